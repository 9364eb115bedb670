"""Rollouts with an environment: a sampler that is a hash, a dialogue of characters, and a game."""

import json
from dataclasses import replace
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from benchmarks.waiting import World, measure_waiting
from hypothesis import given
from rows import each_row
from speech import END, Characters, Hashing

from rlx.batch import build_token_batch
from rlx.errors import SpecError
from rlx.plugin import Environment, Problem, Step
from rlx.rollout import (
    NO_PARENT,
    LocalHost,
    TurnPrompt,
    build_rollout_plan,
    check_environment_step,
    find_spans,
    sample_rollout_trees,
)
from rlx.seeding import derive_seed
from rlx.spec import EnvironmentRolloutSpec

TEXTS = ("<answer>1</answer>", "<answer>2</answer>", "<think>3</think>", "é</think>ü")


class Game(Environment):
    """Ends with the answer 1; tells what it knows of a rollout, and of nothing else."""

    kinds: ClassVar[tuple[str, ...]] = ("try", "end")

    def reset(self, problem, seed):
        return (problem["name"], seed)

    def step(self, state, action):
        state = (*state, action.text)
        done = action.spans.get("answer") == "1" or action.forced
        return Step(
            kind="end" if done else "try",
            state=state,
            observation=f"[{state[0]}{action.number}]",
            done=done,
            info={"heard": list(state), "forced": action.forced, "left": action.turns_left},
            anchor=f"after {action.number}",
        )


class Watched(LocalHost):
    """A host that remembers what it was asked."""

    def __init__(self, environment):
        super().__init__(environment)
        self.begun, self.taken = [], []

    def reset(self, calls):
        self.begun += calls
        return super().reset(calls)

    def step(self, calls):
        self.taken.append(calls)
        return super().step(calls)


def spec(**options):
    said = {
        "environment": {"plugin": "game"},
        "num_generations": 3,
        "max_turns": 4,
        "turn": {"template": "Q: {prompt}\n", "max_new_tokens": 20, "spans": ["think", "answer"]},
        "observation": "inline",
    }
    return EnvironmentRolloutSpec.model_validate({**said, **options})


def problem(name):
    return Problem(id=name, prompt=f"{name}?", fields={"name": name})


def grown(names, seeds, session=None, host=None, **options):
    session = session or Hashing(TEXTS)
    host = host or LocalHost(Game())
    problems = [problem(n) for n in names]
    return sample_rollout_trees(
        build_rollout_plan(spec(**options)), problems, seeds, session, Characters(), host
    )


def rollouts(tree):
    """The segments behind the prompt, rollout by rollout; each continues the one before."""
    chains = []
    for index, segment in enumerate(tree.segments[1:], start=1):
        if segment.parent == 0:
            chains.append([])
        else:
            assert segment.parent == index - 1
        chains[-1].append(replace(segment, parent=len(chains[-1])))
    return chains


def everyone(trees):
    return [chain for tree in trees for chain in rollouts(tree)]


def test_a_tree_is_a_prompt_and_a_chain_for_every_rollout():
    trees = grown("abcd", range(4))
    for tree in trees:
        assert (tree.segments[0].author, tree.segments[0].parent) == ("prompt", NO_PARENT)
        assert len(rollouts(tree)) == 3
        assert len(build_token_batch([tree]).rows) == 3
    for chain in everyone(trees):
        turns = [s for s in chain if s.author == "policy"]
        assert [s.author for s in chain[::2]] == ["policy"] * len(turns)
        assert all(s.author == "environment" for s in chain[1::2])
        assert [s.turn for s in turns] == list(range(1, len(turns) + 1))
        assert len(turns) <= 4


def test_a_rollout_that_is_done_has_nothing_behind_it():
    chains = everyone(grown("abcdef", range(6)))
    lengths = set()
    for chain in chains:
        *before, last = [s for s in chain if s.author == "policy"]
        assert all(s.kind == "try" for s in before)
        done = "<answer>1</answer>" in last.text
        assert last.kind == ("end" if done else "try")
        # One that was cut off ends with what it would have seen.
        assert chain[-1].author == ("policy" if done else "environment")
        lengths.add((len(before) + 1, done))
    assert lengths >= {(1, True), (2, True), (4, False)}


def test_only_those_that_go_on_are_sampled_each_continuing_its_own_completion():
    session = Hashing(TEXTS)
    trees = grown("abc", [7, 8, 9], session)
    before = []
    for number, (requests, sampling) in enumerate(session.calls, start=1):
        going = [c for c in everyone(trees) if sum(s.author == "policy" for s in c) >= number]
        assert sum(len(r.seeds) for r in requests) == len(going)
        for request in requests:
            if number == 1:
                assert request.extends is None
            else:
                context, completion = before[request.extends]
                whole = context + completion.token_ids
                assert request.context[: len(whole)] == whole
        before = [
            (r.context, session.complete(r.context, seed, sampling))
            for r in requests
            for seed in r.seeds
        ]
    assert len(session.calls) == 4


def test_contexts_are_exactly_the_tokens_on_the_path():
    session = Hashing(TEXTS)
    trees = grown("ab", [1, 2], session)
    asked = {
        (r.context, seed) for requests, _ in session.calls for r in requests for seed in r.seeds
    }
    seen = set()
    for tree in trees:
        for index in tree.policy_segments:
            segment = tree.segments[index]
            seen.add((tree.token_ids(segment.parent), segment.seed))
            _, ends = Characters().read(segment.token_ids)
            first = segment.turn == 1
            spans = find_spans(segment.text, ends, ("think", "answer"), first_turn=first)
            assert segment.spans == spans
    assert seen == asked


class Thinking(Characters):
    """A dialogue whose template begins every message of the policy with an open `<think>`."""

    def reply(self, text, after, prefix=""):
        return (*super().reply(text, after), *self.encode("<think>\n" + prefix))


def test_later_turns_close_the_think_that_their_header_opens():
    found = set()
    for dialogue in (Characters(), Thinking()):
        plan = build_rollout_plan(spec(observation="message"))
        problems = [problem(name) for name in "abcdef"]
        trees = sample_rollout_trees(
            plan, problems, range(6), Hashing(TEXTS), dialogue, LocalHost(Game())
        )
        for turn in (s for chain in everyone(trees) for s in chain if s.author == "policy"):
            if "</think>" in turn.text and "<think>" not in turn.text:
                opened, later = type(dialogue) is Thinking, turn.turn > 1
                text = turn.spans["think"].text if "think" in turn.spans else None
                found.add((opened, later, text, turn.hull is not None))
    assert found == {
        *((opened, False, "é", True) for opened in (False, True)),
        (False, True, None, False),
        (True, True, "é", True),
    }


def test_the_environment_sees_each_turn_as_it_was():
    host = Watched(Game())
    trees = grown("ab", [5, 6], host=host)
    places = [(name, seed, i) for name, seed in (("a", 5), ("b", 6)) for i in range(3)]
    assert host.begun == [
        ({"name": name}, derive_seed(seed, "environment", i)) for name, seed, i in places
    ]
    for number, calls in enumerate(host.taken, start=1):
        turns = [s for c in everyone(trees) for s in c if s.author == "policy" and s.turn == number]
        assert len(calls) == len(turns)
        for (state, action), turn in zip(calls, turns, strict=True):
            assert (action.text, action.number) == (turn.text, number)
            assert action.spans == {name: span.text for name, span in turn.spans.items()}
            assert action.finish_reason == turn.finish_reason
            assert (action.turns_left, action.forced) == (4 - number, False)
            assert turn.info["heard"] == [*state, turn.text]


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=5, unique=True), st.data())
def test_neither_order_nor_batch_mates_change_a_rollout(seeds, data):
    names = [str(seed) for seed in seeds]
    together = grown(names, seeds, forced_answer={"template": "!"})
    kept = data.draw(st.permutations(range(len(seeds))))[: data.draw(st.integers(1, len(seeds)))]
    apart = grown(
        [names[i] for i in kept], [seeds[i] for i in kept], forced_answer={"template": "!"}
    )
    assert apart == [together[i] for i in kept]


# The forced answer -------------------------------------------------------------------------------


def test_those_that_are_not_done_are_told_to_answer_in_a_turn_of_its_own():
    session, host = Hashing(TEXTS), Watched(Game())
    options = {"forced_answer": {"template": "Answer!", "max_new_tokens": 7}, "max_turns": 2}
    trees = grown("abcd", range(4), session, host, **options)
    forced = 0
    for chain in everyone(trees):
        turns = [s for s in chain if s.author == "policy"]
        shown = [s for s in chain if s.author == "environment"]
        assert chain[-1].author == "policy", "the game is over for all"
        assert ["Answer!" in s.text for s in shown] == [False, True][: len(shown)]
        assert [t.info["forced"] for t in turns] == [False, False, True][: len(turns)]
        assert [t.info["left"] for t in turns] == [1, 0, 0][: len(turns)]
        forced += len(turns) == 3
    assert 0 < forced < 12
    assert [sampling.max_new_tokens for _, sampling in session.calls] == [20, 20, 7]
    batch = build_token_batch(trees)
    last = [len(row.turns) for row in batch.rows]
    assert batch.turn_ids.max(dim=1).values.tolist() == last
    assert 3 in last


# Room --------------------------------------------------------------------------------------------


def test_a_rollout_that_outgrows_the_model_ends_and_the_others_go_on():
    wide = everyone(grown("abcd", range(4)))
    opening = len("Q: a?\n") + 1

    def needed(chain, number):
        """Tokens that a rollout takes with turn `number`, which may be of 20."""
        return opening + sum(len(s.token_ids) for s in chain[: 2 * number - 2]) + 20

    longest = min(needed(chain, 3) for chain in wide if len(chain) > 4)  # one fits exactly
    session = Hashing(TEXTS, longest)
    narrow = everyone(grown("abcd", range(4), session))
    kept = set()
    for long, short in zip(wide, narrow, strict=True):
        turns, had = (len(chain[::2]) for chain in (long, short))
        fits = [n for n in range(1, turns + 1) if needed(long, n) <= longest]
        assert had == max(fits)
        assert short == long[: len(short)]
        assert had == turns or short[-1].author == "environment"
        kept.add((had, had < turns))
    assert {(2, True), (3, True)} <= kept
    assert any(not cut for _, cut in kept)


# Observations ------------------------------------------------------------------------------------


@each_row("observation", ["inline", "message"])
def test_how_an_observation_is_shown(observation):
    seen = set()
    for chain in everyone(grown("abcd", range(4), observation=observation)):
        for turn, shown in zip(chain[::2], chain[1::2], strict=False):
            said = tuple(map(ord, shown.text))
            closes = observation == "message" and turn.finish_reason == "length"
            assert shown.token_ids == ((END, *said) if closes else said)
            seen.add(turn.finish_reason)
    assert seen == {"stop", "length"}


# Faults ------------------------------------------------------------------------------------------


def test_what_no_token_stands_for_is_the_environment_s_fault():
    class Limited(Characters):
        def encode_observation(self, text, after, *, inline, prefix=""):
            if "2" in text:
                raise SpecError("no token for '2'")
            return TurnPrompt(text, tuple(map(ord, text)))

    plan_ = build_rollout_plan(spec())
    (tree,) = sample_rollout_trees(
        plan_, [problem("a")], [1], Hashing(TEXTS), Limited(), LocalHost(Game())
    )
    faults = [s.info["fault"] for s in tree.segments if "fault" in s.info]
    assert faults and set(faults) == {"its observation cannot be shown: no token for '2'"}
    assert all(s.turn <= 2 for s in tree.segments)


def test_half_a_character_is_replaced_not_refused():
    """A model can write JSON that an environment decodes to half a character and repeats."""
    half = json.loads('"a\\ud83d"')
    given = Step(kind="try", observation=half, info={half: [half]}, anchor=half)
    step = check_environment_step(given, ("try",))
    assert step.observation == step.anchor == "a\ufffd"
    assert step.info == {"a\ufffd": ["a\ufffd"]}


deep = []
for _ in range(100_000):
    deep = [deep]


@each_row(
    ("step", "says"),
    [
        (None, "gave NoneType instead of a Step"),
        (Step(kind="other"), "kind 'other'; its kinds are try"),
        (Step(kind="try", observation=b"x"), "an observation that is not text"),
        (Step(kind="try", observation="x" * 2_000_000), "at most 1000000 characters"),
        (Step(kind="try", anchor=3), "int as an anchor"),
        (Step(kind="try", info=[1]), "list as info"),
        (Step(kind="try", info={"a": {1}}), "info that is not plain JSON"),
        (Step(kind="try", info={"a": float("nan")}), "info that is not plain JSON"),
        (Step(kind="try", info={"a": deep}), "info that is not plain JSON"),
        (Step(kind="try", info={"a": "x" * 2_000_000}), "info of 2000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "step",
)
def test_nonsense_is_refused(step, says):
    with pytest.raises(ValueError, match=says):
        check_environment_step(step, ("try",))


# Two queues --------------------------------------------------------------------------------------


def test_a_slow_tenth_costs_a_step_its_share_of_waiting():
    """In seconds of a clock that the test moves: 10 turns of 64 dialogues, of 1 or 10 s."""
    model = measure_waiting("none", None).seconds
    lockstep, queues = (measure_waiting("calls", patience) for patience in (None, 0.2))
    assert lockstep.batches == 10
    assert lockstep.seconds == pytest.approx(10 * 10 + model)
    assert queues.seconds <= 1.3 * (queues.longest + model)
    assert queues.seconds < lockstep.seconds / 1.5
    assert queues.trees == lockstep.trees, "the order of answers changes no dialogue"
    slow = measure_waiting("dialogues", 0.2)
    assert slow.longest == 100
    assert slow.seconds <= 1.3 * (slow.longest + model)


def test_without_patience_a_batch_waits_for_every_dialogue():
    """So that batches do not depend on time, and a resumed run has the same numbers."""
    session = Hashing(TEXTS)
    usual = grown("abcd", range(4), session)
    world = World("calls", None)
    world.host = LocalHost(Game())
    other = Hashing(TEXTS)
    assert grown("abcd", range(4), other, world) == usual
    assert other.calls == session.calls
