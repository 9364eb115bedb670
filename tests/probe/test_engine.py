"""Probing with a sampler that follows a script: what is asked, drawn and scored, and how."""

import hashlib
import math
from contextlib import contextmanager
from types import SimpleNamespace

import hypothesis.strategies as st
from hypothesis import given, settings
from pools import InProcess
from rows import each_row
from speech import END, Characters

from rlx.plugin import Demonstration, Problem, Score
from rlx.probe import ProbeContext, probe_model
from rlx.probe.questions import AssembledResponse, build_response_tree
from rlx.reward import NamedReward, score_rollouts
from rlx.rollout import Completion, build_rollout_plan, sample_rollout_trees
from rlx.seeding import derive_seed
from rlx.spec import (
    GlobalReward,
    ProbeSpec,
    SingleRolloutSpec,
    TurnReward,
    TurnSpec,
    TwoTurnRolloutSpec,
)


class Trimming(Characters):
    """As tokenizers whose words begin with a space: the first of a text loses it."""

    def read(self, token_ids):
        text, ends = super().read(token_ids)
        lost = len(text) - len(text.removeprefix(" "))
        return text[lost:], tuple(end - lost for end in ends)


class Scripted:
    """A sampler that says what `script` gives for a context and a seed; remembers requests."""

    def __init__(self, script):
        self.script = script
        self.calls = []

    @contextmanager
    def session(self):
        yield self

    def generate(self, requests, sampling):
        self.calls.append((list(requests), sampling))
        return [tuple(self.say(r.context, s, sampling) for s in r.seeds) for r in requests]

    def say(self, context, seed, sampling):
        text = self.script("".join(map(chr, context[1:])), seed)
        short = text.removesuffix("~")  # out of budget, and so without an end token
        ids = (*map(ord, short), *(() if short != text or sampling.stop else (END,)))
        return Completion(ids, (-0.5,) * len(ids), "length" if short != text else "stop")


class Task:
    """Problems whose answer is their name; answers that say the same after folding."""

    def problem(self, split, index, seed):
        return problem(str(index))

    def demonstration(self, problem, seed):
        return Demonstration(("<think>1</think>",))

    def corruption(self, sentence, seed):
        return sentence.replace("1", "2") if "1" in sentence else None

    def canonical(self, answer):
        return "".join(sorted(answer.replace(" ", "")))


def problem(name):
    return Problem(id=name, prompt=f"{name}?", fields={"answer": name})


def named(name, function, *, scope="sample", whole=False, **use):
    plugin = SimpleNamespace(scope=scope, score=function)
    if whole:
        return NamedReward(name, GlobalReward(plugin=name, **use), plugin, "global")
    return NamedReward(name, TurnReward(plugin=name, turn=use.pop("turn", "answer"), **use), plugin)


def is_right(sample):
    if "fault" in sample.response:
        raise ValueError("cannot judge")
    return float(sample.spans.get("answer") == sample.problem["answer"])


RIGHT = named("accuracy", is_right, on_error="drop_sample")
ANSWERS = {
    "a": "<think>1.\n1+1.\n</think><answer>a</answer>",
    "b": "<think>1</think><answer>c</answer>",
    "c": "<answer>c</answer>",
    "d": "<think>never done~",
    "e": "<think></think><answer>e</answer>",
    "f": "<think>1</think> so there",
}
SINGLE = SingleRolloutSpec(answer=TurnSpec(template="{prompt}", spans=("think", "answer")))


def script(context, seed):
    """Whole responses as above; of forced answers the right one, or the last two characters."""
    name, _, turn = context.partition("?")
    if not turn:
        return ANSWERS[name]
    said = [f"{name}</answer>", "zz\n", f" {name} ", "fault</answer>"]
    drawn = said[hashlib.sha256(str(seed).encode()).digest()[0] % len(said)]
    return drawn if turn.endswith("<answer>") else f" on</think><answer>{drawn}~"


def means(says=script, rewards=(RIGHT,), rollout=SINGLE, speech=None, **more):
    return ProbeContext(
        plan=build_rollout_plan(rollout).copy_with_sampling(1),
        sampler=Scripted(says),
        speech=speech or Characters(),
        task=more.get("task", Task()),
        rewards=rewards,
        correct="accuracy",
        pool=more.get("pool", InProcess()),
    )


def probed(with_, names="abcdef", seeds=None, **options):
    spec = ProbeSpec(**{"samples": 8, "cut": {"by": "sentence"}, **options})
    seeds = seeds or [derive_seed(0, name) for name in names]
    return probe_model(spec, with_, [problem(n) for n in names], seeds)


def test_every_point_of_every_reasoning_is_continued_so_often_from_its_own_seeds():
    found = probed(used := means(), schemes=["early_answering", "mistake"])
    counts = {}
    for s in found.samples:
        counts[s.answered, s.scheme, s.point.number] = (
            counts.get((s.answered, s.scheme, s.point.number), 0) + 1
        )
    early = {(0, n): 8 for n in range(3)} | {(1, 0): 8, (1, 1): 8, (4, 0): 8, (5, 0): 8, (5, 1): 8}
    wrong = {(0, 1): 8, (0, 2): 8, (1, 1): 8, (5, 1): 8}
    assert counts == {
        **{(a, "early_answering", n): c for (a, n), c in early.items()},
        **{(a, "mistake", n): c for (a, n), c in wrong.items()},
    }
    assert len({s.seed for s in found.samples}) == len(found.samples)
    for s in found.samples:
        one = found.answered[s.answered]
        assert s.response.text.startswith("".join(map(chr, s.response.token_ids[: s.given])))
        if s.scheme == "early_answering":
            kept = one.reasoning.start + s.point.tokens
            assert s.response.token_ids[:kept] == one.turn_ids[:kept]
    # A request is one context, read once for all of its samples.
    contexts = [r.context for requests, _ in used.sampler.calls[1:] for r in requests]
    assert len(contexts) == len(set(contexts)) == len(counts)
    settings = [s for _, s in used.sampler.calls[1:]]
    assert {s.max_new_tokens for s in settings if s.stop == ("</answer>",)} == {48}
    # What goes on without a forced answer has what is left of its turn's budget.
    spoiled = [s.max_new_tokens for s in settings if not s.stop]
    assert spoiled and all(0 < left < 256 for left in spoiled)


def test_a_response_without_a_finished_reasoning_is_counted_and_not_probed():
    found = probed(means())
    assert [a.reasoning is None for a in found.answered] == [False, False, True, True, False, False]
    assert {s.answered for s in found.samples} == {0, 1, 4, 5}
    assert [a.answer for a in found.answered] == ["a", "c", "c", None, "e", None]
    assert [a.correct for a in found.answered] == [True, False, True, False, True, False]


@settings(max_examples=20)
@given(st.permutations("abcdef"), st.integers(1, 6))
def test_other_problems_change_nothing(order, count):
    together = probed(means(), schemes=["early_answering", "mistake"])
    apart = probed(means(), order[:count], schemes=["early_answering", "mistake"])

    def of(found, name):
        return [
            (s.scheme, s.point, s.seed, s.response, s.rewards)
            for s in found.samples
            if found.answered[s.answered].problem.id == name
        ]

    assert all(of(apart, name) == of(together, name) for name in order[:count])


@each_row("name", "abcdef")
def test_a_reward_sees_a_sample_as_it_sees_a_training_rollout_that_says_the_same(name):
    levels = build_rollout_plan(SINGLE)
    pools = InProcess(), InProcess()
    sampler = Scripted(script)
    (tree,) = sample_rollout_trees(levels, [problem(name)], [3], sampler, Characters())
    turns = [tree.segments[i] for i in tree.policy_segments]
    written = [AssembledResponse(t.token_ids, t.text, t.finish_reason) for t in turns]
    prompt = tree.segments[0].token_ids
    again = build_response_tree(tree.problem, prompt, levels.levels[0], written)
    for one, pool in zip((tree, again), pools, strict=True):
        score_rollouts([one], [RIGHT], pool)
    assert [j.samples for j in pools[0].jobs] == [j.samples for j in pools[1].jobs]


def test_samples_of_one_point_are_a_group_to_rewards_that_compare():
    def rank(samples):
        return [float(len(samples))] * len(samples)

    rewards = (RIGHT, named("_all", rank, scope="group"), named("_kin", rank, scope="siblings"))
    whole = named("_whole", rank, scope="group", whole=True)
    found = probed(means(rewards=(*rewards, whole)), schemes=["early_answering", "mistake"])
    assert {s.rewards[n].raw for s in found.samples for n in ("_all", "_kin")} == {8.0}
    assert {s.global_rewards["_whole"].raw for s in found.samples} == {8.0}


def test_answers_are_the_same_in_the_tasks_own_form_and_absent_where_there_is_none():
    def says(context, seed):
        whole = "<think>1</think><answer>b a</answer>"
        return f"{'ab' if seed % 2 else 'bc'}</answer>" if "?" in context[:-1] else whole

    found = probed(means(says), "a", samples=30)
    assert found.answered[0].answer == "ab"
    assert {(s.response.text[-11:-9], s.same) for s in found.samples} == {
        ("ab", True),
        ("bc", False),
    }
    assert {s.same for s in probed(means(), "f").samples} == {None}

    folding = SimpleNamespace(problem=Task().problem, demonstration=Task().demonstration)
    (one,) = probed(means(says, task=folding), "a").answered
    assert one.answer == "ba"


def test_an_end_that_is_added_is_counted_and_the_answer_is_scored_with_it():
    found = probed(means(), "a", samples=40)
    tails = {s.response.text.rpartition("<answer>")[2]: s.wrapped for s in found.samples}
    added = {
        "a</answer>": False,
        "zz</answer>": True,
        " a </answer>": True,
        "fault</answer>": False,
    }
    assert tails == added
    assert {s.response.finish_reason for s in found.samples} == {"stop"}
    assert {s.correct for s in found.samples if "fault" in s.response.text} == {None}


def test_the_two_parts_of_a_response_are_read_as_one_text():
    found = probed(means(speech=Trimming()), "b", schemes=["mistake"])
    for s in found.samples:  # judged as it stands, even out of budget
        assert s.response.text.startswith("<think>2 on</think><answer>") and not s.wrapped
        assert s.response.finish_reason == "length"


def stated(sample):
    said = sample.spans.get("confidence")
    return Score(0.0, parts={} if said is None else {"confidence": float(said)})


def test_confidences_are_those_stated_below_the_answer():
    two = TwoTurnRolloutSpec(
        num_generations_confidence=2,
        answer=SINGLE.answer,
        confidence=TurnSpec(template="sure?", spans=("confidence",)),
    )

    def says(context, seed):
        if context.endswith("sure?"):
            return ("<confidence>0.25</confidence>", "no idea")[seed % 2]
        return script(context, seed)

    rewards = (RIGHT, named("brier", stated, turn="confidence"))
    found = probed(means(says, rewards, two), "abc", seeds=[1, 2, 9])
    said = [c for a in found.answered for c in a.confidences]
    assert [len(a.confidences) for a in found.answered] == [2, 2, 2]
    assert {c for c in said if not math.isnan(c)} == {0.25} and any(map(math.isnan, said))
    assert all(set(s.rewards) == {"accuracy"} for s in found.samples)
