"""Lessons acted out in an environment: the very tokens that a rollout of the same words has."""

from typing import ClassVar

import pytest
from rows import each_row

from rlx.errors import PluginError
from rlx.model import build_policy
from rlx.model.dialogue import DemonstrationPlayer
from rlx.plugin import Demonstration, Environment, Problem, Step
from rlx.rollout import Completion, LocalHost, build_rollout_plan, sample_rollout_trees
from rlx.spec import ExperimentSpec, TinyModelSpec

SPEC = {
    "name": "acted",
    "model": {"kind": "tiny"},
    "task": {"plugin": "script"},
    "rollout": {
        "schedule": "environment",
        "environment": {"plugin": "countdown"},
        "num_generations": 1,
        "max_turns": 3,
        "turn": {"template": "nums: {prompt}\n", "max_new_tokens": 9, "spans": ["think", "answer"]},
        "forced_answer": {"template": "!"},
    },
    "rewards": {"global": {"right": {"plugin": "right"}}},
    "evaluation": {"correct": "right"},
    "phases": [{"name": "all", "steps": 1}],
}


class Down(Environment):
    """Counts down from the problem's number; says how much is left."""

    kinds: ClassVar[tuple[str, ...]] = ("say",)

    def reset(self, problem, seed):
        return problem["from"]

    def step(self, state, action):
        left = state - int(action.spans.get("answer", "0") == "1")
        return Step(kind="say", state=left, observation=f"{left}\n", done=left == 0)


class Script:
    """Says 1 in most turns, and shows in the others what it was given."""

    def lesson(self, index, seed):
        start = index % 5 + 1
        return Problem(id=f"{index}", prompt=f"{start}", fields={"from": start})

    def act(self, problem, turns, observations, seed):
        assert len(turns) == len(observations)
        if len(turns) == 1 and problem.fields["from"] == 3:
            return f"{observations[-1].strip()}?"
        return "<answer>1</answer>"

    problem = demonstration = None


class Replaying:
    """A session that says what it is told to, as a model would sample it."""

    context_length = 2048

    def __init__(self, turns):
        self.turns = list(turns)

    def generate(self, requests, sampling):
        ids = self.turns.pop(0)
        return [(Completion(ids, (0.0,) * len(ids), "stop"),)]


@pytest.fixture(scope="module")
def dialogue():
    tiny = TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1, intermediate_size=32)
    return build_policy(tiny, 0).dialogue


def spec(**rollout):
    return ExperimentSpec.model_validate({**SPEC, "rollout": {**SPEC["rollout"], **rollout}})


def own_turns(episode):
    """The policy's tokens, turn by turn."""
    turns, before = [], False
    for token, own in zip(episode.token_ids, episode.is_own, strict=True):
        if own and not before:
            turns.append([])
        if own:
            turns[-1].append(token)
        before = own
    return [tuple(turn) for turn in turns]


@each_row(
    "rollout",
    [{}, {"observation": "inline"}, {"forced_answer": None}, {"turn": {"stop": ["</answer>"]}}],
    ids=["message", "inline", "not forced", "stopped"],
)
@each_row("index", range(5))
def test_a_lesson_is_what_a_rollout_of_its_words_is(index, rollout, dialogue):
    turn = {**SPEC["rollout"]["turn"], **rollout.get("turn", {})}
    said = spec(**{**rollout, "turn": turn})
    episode = DemonstrationPlayer(said, Script(), Down()).episode(dialogue, index)
    turns = own_turns(episode)
    problem = Script().lesson(index, 0)
    (tree,) = sample_rollout_trees(
        build_rollout_plan(said.rollout),
        [problem],
        [1],
        Replaying(turns),
        dialogue,
        LocalHost(Down()),
    )
    (end,) = tree.rollouts
    assert tree.token_ids(end) == episode.token_ids
    assert [tree.segments[s].token_ids for s in tree.turns(end)] == turns
    stops = turn.get("stop", ())
    for ids in turns:
        text, _ = dialogue.read(ids)
        assert (ids[-1] in dialogue.end_ids) == (not any(stop in text for stop in stops))


def test_an_environment_of_another_task_is_named(dialogue):
    script = Script()
    script.lesson = lambda index, seed: Problem(id="7", prompt="1", fields={})
    said = r"cannot begin with the task's problem '7': KeyError: 'from'; .* of another task"
    with pytest.raises(PluginError, match=said):
        DemonstrationPlayer(spec(), script, Down()).episode(dialogue, 0)


class Telling:
    """Demonstrates an answer and a confidence, as two turns or as one."""

    def __init__(self, *turns):
        self.turns = turns

    def problem(self, split, index, seed):
        return Problem(id="1", prompt="nums: 1\n", fields={})

    def demonstration(self, problem, seed):
        return Demonstration(self.turns)


def test_an_episode_of_one_turn_needs_no_lesson(dialogue):
    rollout = {**SPEC["rollout"], "max_turns": 1}
    one = ExperimentSpec.model_validate({**SPEC, "rollout": {**rollout, "forced_answer": None}})
    shown = DemonstrationPlayer(one, Telling("<answer>1</answer>")).episode(dialogue, 0)
    assert [dialogue.read(turn)[0] for turn in own_turns(shown)] == ["<answer>1</answer>"]
    asked = ExperimentSpec.model_validate({**SPEC, "rollout": rollout})  # a second turn follows
    with pytest.raises(ValueError, match="a task with lessons"):
        DemonstrationPlayer(asked, Telling("<answer>1</answer>")).episode(dialogue, 0)


def test_turns_that_fork_are_demonstrated_as_the_sequence_that_they_are(dialogue):
    answer, confidence = "<think>1=1</think><answer>1</answer>", "<confidence>0.5</confidence>"
    rollout = {
        "schedule": "two_turn",
        "answer": {"stop": ["</answer>"]},
        "confidence": {"template": "", "spans": ["confidence"]},
    }
    rewards = {"turn": {"right": {"plugin": "right", "turn": "answer"}}}
    forking = ExperimentSpec.model_validate({**SPEC, "rollout": rollout, "rewards": rewards})
    apart = DemonstrationPlayer(forking, Telling(answer, confidence)).episode(dialogue, 0)
    together = DemonstrationPlayer(forking, Telling(answer + confidence)).episode(dialogue, 0)
    assert apart == together
    assert apart.token_ids[-1] == dialogue.end_ids[0]
    assert apart.token_ids.count(dialogue.end_ids[0]) == 1
