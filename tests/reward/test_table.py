"""Named rewards of a step: who is scored when, with what in hand, and what becomes of failures."""

import re
from dataclasses import replace
from functools import partial
from itertools import permutations
from types import SimpleNamespace

import pytest
import trees
from pools import InProcess
from rows import each_row
from trees import asked

from rlx.errors import RewardError
from rlx.plugin import FAILED
from rlx.reward import (
    NamedReward,
    RewardEntry,
    RewardTable,
    rescore_rollouts,
    score_rollouts,
)
from rlx.rollout import Segment
from rlx.spec import GlobalReward, TurnReward, ValueOnError


def named(name, function, turn="answer", *, scope="sample", **use):
    plugin = SimpleNamespace(scope=scope, score=function)
    return NamedReward(name, TurnReward(plugin=name, turn=turn, **use), plugin)


def turn(parent, text, **more):
    """A turn whose environment reports what it said."""
    return trees.turn(parent, text, info={"seen": text}, **more)


def reply(parent, text):
    return Segment(parent=parent, author="environment", token_ids=(1,), text=text)


def tree(name, answers):
    """`answers` is {text of an answer: texts of its confidences}; names are distinct by number.

    Segments: 0 the prompt; then each answer, its question, its confidences.
    """
    segments = []
    for answer, confidences in answers:
        at = len(segments) + 1
        segments += [turn(0, answer, answer=f"in {answer}"), asked(at, "sure?")]
        segments += [turn(at + 1, c, kind="confidence", number=2) for c in confidences]
    return trees.tree(*segments, name=name, fields={"name": name})


# answers at 1 and 5 of the first tree, 1 of the second
ONE = tree("one", [("right", ["0.9", "0.5"]), ("wrong", ["0.2", "0.8"])])
TWO = tree("two", [("wrong", ["0.3", "0.7"])])
ANSWERS = [(0, 1), (0, 5), (1, 1)]
CONFIDENCES = [(0, 3), (0, 4), (0, 7), (0, 8), (1, 3), (1, 4)]


def is_right(sample):
    if sample.response == "bad":
        raise ValueError("cannot judge")
    return float(sample.response == "right")


def brier_of(sample):
    return 1 - (sample.of - float(sample.response)) ** 2


accuracy = named("accuracy", is_right, weight=10.0)
brier = named("brier", brier_of, "confidence", of="accuracy", weight=2.0)


def raws(table, name):
    return {place: es[name].raw for place, es in table.turns.items() if name in es}


# Who is scored, and with what ---------------------------------------------------------------------


def test_every_turn_gets_the_rewards_of_its_kind():
    table = score_rollouts([ONE, TWO], [accuracy, brier], InProcess())
    assert set(table.turns) == {*ANSWERS, *CONFIDENCES}
    assert raws(table, "accuracy") == {(0, 1): 1.0, (0, 5): 0.0, (1, 1): 0.0}
    by_hand = [0.99, 0.75, 0.96, 0.36, 0.91, 0.51]
    assert raws(table, "brier") == pytest.approx(dict(zip(CONFIDENCES, by_hand, strict=True)))
    assert table.dropped == frozenset() and table.faults == {}


def test_of_reads_the_nearest_earlier_turn_of_that_kind():
    chain = trees.tree(
        turn(0, "wrong"),
        reply(1, ""),
        turn(2, "right", number=2),
        asked(3),
        turn(4, "0.9", kind="confidence", number=3),
    )
    assert raws(score_rollouts([chain], [accuracy, brier], InProcess()), "brier") == {
        (0, 5): pytest.approx(0.99)
    }


@each_row("order", list(permutations(range(4))))
def test_rewards_run_after_what_they_need_in_whatever_order_they_are_written(order):
    calls = []

    def noting(name, value):
        def f(sample):
            calls.append(name)
            return value(sample)

        return f

    rewards = [
        named("a", noting("a", is_right)),
        named("b", noting("b", lambda s: s.of + 1), of="a"),
        named("c", noting("c", lambda s: s.of + 1), "confidence", of="b"),
        named("d", noting("d", lambda s: 0.0), "confidence"),
    ]
    table = score_rollouts([TWO], [rewards[i] for i in order], InProcess())
    assert calls.index("a") < calls.index("b") < calls.index("c")
    assert raws(table, "c") == {(0, 3): 2.0, (0, 4): 2.0}


def test_what_a_reward_sees_of_a_turn():
    pool = InProcess()
    score_rollouts([ONE], [accuracy, brier], pool)
    samples = {s.id: s for job in pool.jobs for s in job.samples}
    answer, confidence = samples["0.1"], samples["0.4"]
    assert answer.problem == {"name": "one"}
    assert (answer.turn, answer.number, answer.response) == ("answer", 1, "right")
    assert answer.spans == {"answer": "in right"}
    assert answer.context == () and answer.of is None
    assert (answer.finish_reason, answer.info) == ("stop", {"seen": "right"})
    assert (confidence.turn, confidence.number, confidence.response) == ("confidence", 2, "0.5")
    assert confidence.context == ("right",), "earlier turns, and never a prompt"


# Scopes -------------------------------------------------------------------------------------------


def positions(samples):
    return [float(i) for i in range(len(samples))]


@each_row(
    ("scope", "turn", "together"),
    [
        ("siblings", "confidence", [["0.3", "0.4"], ["0.7", "0.8"], ["1.3", "1.4"]]),
        ("group", "confidence", [["0.3", "0.4", "0.7", "0.8"], ["1.3", "1.4"]]),
        ("siblings", "answer", [["0.1", "0.5"], ["1.1"]]),
        ("group", "answer", [["0.1", "0.5"], ["1.1"]]),
    ],
)
def test_wider_scopes_see_their_company_and_get_their_own_verdicts(scope, turn, together):
    pool = InProcess()
    table = score_rollouts([ONE, TWO], [named("rank", positions, turn, scope=scope)], pool)
    assert pool.seen == together
    places = [[tuple(map(int, name.split("."))) for name in group] for group in together]
    expected = {place: float(i) for group in places for i, place in enumerate(group)}
    assert raws(table, "rank") == expected


def test_a_wider_scope_does_not_see_turns_whose_parent_reward_is_absent():
    abstaining = named("accuracy", lambda s: None if s.response == "wrong" else 1.0)
    rank = named("rank", positions, "confidence", scope="group", of="accuracy")
    pool = InProcess()
    table = score_rollouts([ONE], [abstaining, rank], pool)
    assert pool.seen[-1] == ["0.3", "0.4"]
    assert raws(table, "rank") == {(0, 3): 0.0, (0, 4): 1.0, (0, 7): None, (0, 8): None}


# Whole rollouts -----------------------------------------------------------------------------------


def overall(name, function, *, scope="sample", **use):
    plugin = SimpleNamespace(scope=scope, score=function)
    return NamedReward(name, GlobalReward(plugin=name, **use), plugin, "global")


def wholes(table, name):
    return {place: es[name].raw for place, es in table.rollouts.items() if name in es}


# Two rollouts of one prompt, query ─ reply ─ answer each; the first is asked for a confidence too.
CHAINS = trees.tree(
    turn(0, "who", kind="query"),
    reply(1, "nobody"),
    turn(2, "right", number=2),
    turn(0, "where", kind="query"),
    reply(4, "nowhere"),
    turn(5, "wrong", number=2),
    asked(3, "sure?"),
    turn(7, "0.9", kind="confidence", number=3),
    name="c",
)


def test_a_global_reward_is_given_once_to_every_rollout_of_a_prompt():
    table = score_rollouts([ONE, CHAINS], [overall("length", lambda s: 1.0)], InProcess())
    assert wholes(table, "length") == dict.fromkeys([*ANSWERS[:2], (1, 3), (1, 6)], 1.0)
    assert set(table.rollouts) == {*ANSWERS[:2], (1, 3), (1, 6)}


def test_what_a_global_reward_sees_of_a_rollout():
    pool = InProcess()
    score_rollouts([CHAINS], [overall("seen", lambda s: 1.0)], pool)
    sample = pool.jobs[0].samples[0]
    assert (sample.id, sample.turn, sample.number, sample.response) == ("0.3", "answer", 2, "right")
    assert sample.context == ("who",) and sample.observations == ("nobody",)
    assert (sample.n_tokens, sample.info) == (1, {"seen": "right"})


def test_a_global_reward_reads_the_nearest_turn_that_has_a_reward_and_other_global_ones():
    rewards = [
        overall("both", lambda s: s.of + 1, of="doubled", requires="accuracy"),
        overall("doubled", lambda s: 2 * s.of, of="asked"),
        accuracy,
        named("asked", lambda s: float(len(s.response)), "query"),
    ]
    table = score_rollouts([CHAINS], rewards, InProcess())
    assert wholes(table, "doubled") == {(0, 3): 6.0, (0, 6): 10.0}
    assert wholes(table, "both") == {(0, 3): 7.0, (0, 6): 0.0}
    assert table.rollouts[0, 6]["both"].reason == "accuracy failed"


@each_row("scope", ["siblings", "group"])
def test_the_company_of_a_rollout_is_all_rollouts_of_its_prompt(scope):
    pool = InProcess()
    table = score_rollouts([CHAINS, ONE], [overall("rank", positions, scope=scope)], pool)
    assert pool.seen == [["0.3", "0.6"], ["1.1", "1.5"]]
    assert wholes(table, "rank") == {(0, 3): 0.0, (0, 6): 1.0, (1, 1): 0.0, (1, 5): 1.0}


def test_the_score_of_a_rollout_is_the_mean_of_its_turns_plus_its_global_rewards():
    rewards = [
        named("asked", lambda s: 3.0, "query"),
        accuracy,
        overall("bonus", lambda s: 0.5, weight=2.0),
        overall("_kept", lambda s: 9.0),
    ]
    table = score_rollouts([CHAINS], rewards, InProcess())
    assert table.get_rollout_total((0, 3)) == 1.0
    assert table.total_score(0, (1, 3)) == (3 + 10) / 2 + 1
    assert table.total_score(0, (4, 6)) == (3 + 0) / 2 + 1
    some = score_rollouts([CHAINS], rewards[:1], InProcess())
    assert some.total_score(0, (1, 3)) == 3.0, "the mean of those turns that have a reward"
    alone = score_rollouts([CHAINS], rewards[2:], InProcess())
    assert alone.total_score(0, (1, 3)) == 1.0, "no turns: the global ones alone"
    kept = score_rollouts([CHAINS], rewards[3:], InProcess())
    assert kept.get_rollout_total((0, 3)) is None and kept.total_score(0, (1, 3)) is None
    assert kept.rollouts[0, 3]["_kept"].raw == 9.0


def judged(sample):
    if sample.response == "wrong":
        raise ValueError("cannot judge")
    return 1.0


def test_a_rollout_that_cannot_be_judged_gets_a_value_or_ends_the_run():
    replaced = overall("judge", judged, on_error=ValueOnError(value=-1))
    assert wholes(score_rollouts([CHAINS], [replaced], InProcess()), "judge") == {
        (0, 3): 1.0,
        (0, 6): -1.0,
    }
    with pytest.raises(RewardError, match=r"whole rollout of problem c.*rewards\.global\.judge\."):
        score_rollouts([CHAINS], [overall("judge", judged)], InProcess())


@each_row(
    ("on_error", "dropped"),
    [("drop_sample", {(0, 1), (0, 2)}), ("drop_group", {(0, 1), (0, 2), (0, 4)})],
)
def test_a_rollout_whose_environment_failed_is_dropped_alone_or_with_its_group(on_error, dropped):
    """Two turns before the environment fails, and another rollout of the prompt."""
    info = {"fault": "lost", "on_error": on_error}
    fault = Segment(parent=2, author="environment", token_ids=(), info=info)
    lost = turn(1, "right", kind=FAILED, number=2)
    broken = trees.tree(turn(0, "right"), lost, fault, turn(0, "right"))
    rewards = [named("each", is_right, "*"), overall("whole", is_right)]
    table = score_rollouts([broken], rewards, InProcess())
    assert (table.dropped, table.faults) == (dropped, {})
    assert set(raws(table, "each")) == {(0, 1), (0, 4)}, "a turn without an answer is not judged"
    assert set(wholes(table, "whole")) == {(0, 4)}
    broken.segments[3].info["on_error"] = "fail"
    for by, key in (("environment", "rollout.environment.on_error"), ("agent", "rollout.on_error")):
        broken.segments[3].info["by"] = by
        said = rf"the {by} failed on problem p: lost\. .* set {re.escape(key)} to drop_sample"
        with pytest.raises(RewardError, match=said):
            score_rollouts([broken], [accuracy], InProcess())


def test_a_reward_sees_what_the_environment_said_of_earlier_turns_and_not_its_words():
    seen = []
    talk = trees.conversation(
        [("answer", "a", {"n": 1}, "so?"), ("answer", "b", {"n": 2}, None)],
    )
    score_rollouts([talk], [named("judge", lambda s: seen.append(s) or 1.0)], InProcess())
    assert [(s.history, s.context, s.observations) for s in seen] == [
        ((), (), ()),
        (({"n": 1},), ("a",), ("so?",)),
    ]


# Tables of several ranks, and scores of long ago --------------------------------------------------


def test_tables_of_ranks_become_the_table_of_all_trees():
    rewards = [accuracy, brier, overall("judge", judged, on_error="drop_sample")]
    every = [ONE, TWO, CHAINS]
    shares = [score_rollouts(every[rank::2], rewards, InProcess()) for rank in range(2)]
    merged = RewardTable.merge_tables(shares, [range(rank, len(every), 2) for rank in range(2)])
    assert merged == score_rollouts(every, rewards, InProcess())


def test_seconds_of_a_reward_are_those_that_pass_while_it_scores(monkeypatch):
    clock = SimpleNamespace(perf_counter=iter([10.0, 10.5, 20.0, 22.0]).__next__)
    monkeypatch.setattr("rlx.reward.scoring.time", clock)
    table = score_rollouts([ONE], [accuracy, brier], InProcess())
    assert table.seconds == {"accuracy": 0.5, "brier": 2.0}


def test_scoring_again_reads_what_was_said_then_and_says_faults():
    lenient = named("accuracy", is_right, weight=10.0, on_error=ValueOnError(value=0.5))
    table = score_rollouts([BAD], [lenient, brier], InProcess())
    again = {
        (reward.name, place): entry
        for reward, place, entry in rescore_rollouts([BAD], [accuracy, brier], table, InProcess())
    }
    then = {(n, place): e for place, es in table.turns.items() for n, e in es.items()}
    assert again.keys() == then.keys()
    assert {key for key in then if again[key] != then[key]} == {("accuracy", (0, 5))}
    assert again["accuracy", (0, 5)].is_fault


# Absence ------------------------------------------------------------------------------------------


@each_row("link", ["of", "requires"])
def test_a_reward_that_abstains_is_absent_without_fault_and_so_is_what_needs_it(link):
    abstaining = named("accuracy", lambda sample: None)
    needy = named("needy", lambda sample: 1.0, "confidence", **{link: "accuracy"})
    table = score_rollouts([TWO], [abstaining, needy], InProcess())
    for place, name in [((0, 1), "accuracy"), ((0, 3), "needy")]:
        entry = table.turns[place][name]
        assert (entry.raw, entry.status, entry.reason) == (None, "absent", None)
        assert table.get_turn_total(place) is None, "absent is not zero"
    assert table.dropped == frozenset() and table.faults == {}


# Failures -----------------------------------------------------------------------------------------

BAD = tree("bad", [("right", ["0.9", "0.5"]), ("bad", ["0.2", "0.8"])])  # answers at 1 and 5
FINE = tree("fine", [("right", ["0.9"])])


def picky(sample):
    if sample.response == "0.2":
        raise ValueError("no")
    return 0.5


ANSWER = partial(named, "judge", is_right)
CONFIDENCE = partial(named, "judge", picky, "confidence")
ROLLOUT = partial(overall, "judge", judged)


@each_row(
    ("tree", "failing", "on_error", "dropped"),
    [
        (BAD, ANSWER, "drop_sample", {(0, 5), (0, 7), (0, 8)}),
        (BAD, ANSWER, "drop_group", {(0, s) for s in BAD.policy_segments}),
        (BAD, CONFIDENCE, "drop_sample", {(0, 7)}),
        (BAD, CONFIDENCE, "drop_group", {(0, 7), (0, 8)}),
        (CHAINS, ROLLOUT, "drop_sample", {(0, 6)}),
        (CHAINS, ROLLOUT, "drop_group", {(0, 3), (0, 6), (0, 8)}),
    ],
)
def test_what_cannot_be_judged_is_dropped_alone_or_with_its_group(tree, failing, on_error, dropped):
    """From training, not from the record."""
    table = score_rollouts([tree, FINE], [failing(on_error=on_error)], InProcess())
    assert (table.dropped, table.faults) == (dropped, {"judge": 1})
    judged = [
        entries["judge"].raw
        for entries in (*table.turns.values(), *table.rollouts.values())
        if "judge" in entries
    ]
    assert judged.count(None) == 1 and len(judged) > 2


def with_policy(on_error, trees=(BAD, TWO)):
    failing = named("accuracy", is_right, on_error=on_error)
    return score_rollouts(list(trees), [failing, brier], InProcess())


def test_fail_ends_the_run_and_says_how_to_carry_on():
    with pytest.raises(RewardError) as caught:
        with_policy("fail")
    message = str(caught.value)
    assert "reward 'accuracy' failed on turn 'answer' of problem bad" in message
    assert "ValueError: cannot judge" in message
    assert "rewards.turn.accuracy.on_error" in message


def test_what_reads_a_dropped_answer_is_absent():
    table = with_policy("drop_sample")
    entry = table.turns[0, 5]["accuracy"]
    assert (entry.raw, entry.status, entry.reason) == (None, "absent", "ValueError: cannot judge")
    assert raws(table, "brier")[0, 7] is None
    assert raws(table, "brier")[0, 3] == pytest.approx(0.99)
    assert table.faults == {"accuracy": 1}


def test_a_value_stands_in_and_is_read_by_what_depends_on_it():
    table = with_policy(ValueOnError(value=0.5))
    entry = table.turns[0, 5]["accuracy"]
    assert (entry.raw, entry.status) == (0.5, "replaced")
    assert entry.reason == "ValueError: cannot judge"
    assert raws(table, "brier")[0, 7] == pytest.approx(1 - 0.09)
    assert table.dropped == frozenset()
    assert table.faults == {"accuracy": 1}, "a fault that was papered over is still counted"


def test_a_wider_scope_fails_as_one():
    def refuse(samples):
        raise ValueError("no")

    judge = named("judge", refuse, "confidence", scope="siblings", on_error="drop_sample")
    table = score_rollouts([TWO], [judge], InProcess())
    assert table.dropped == {(0, 3), (0, 4)}
    assert table.faults == {"judge": 2}


def test_sums_are_added_in_order_in_every_python():
    """The last bit of what is recorded; from 3.12 on, `sum` gives 0.6 here."""
    raw = {"a": 0.1, "b": 0.2, "c": 0.3}
    entries = {name: RewardEntry(name, value, 1.0, "scored") for name, value in raw.items()}
    turns = {(0, n): {"a": replace(entry, name="a")} for n, entry in enumerate(entries.values(), 1)}
    table = RewardTable(turns={**turns, (1, 1): entries}, dropped=frozenset(), faults={})
    assert table.get_turn_total((1, 1)) == 0.6000000000000001
    assert table.total_score(0, [1, 2, 3]) == 0.6000000000000001 / 3
