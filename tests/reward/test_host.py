"""Environments in real workers: what one does wrong costs its rollout and no more."""

import pytest
from hostile_environments import Misbehaving
from speech import Characters, Hashing

from rlx.plugin import FAILED, Action, Problem
from rlx.reward import PooledHost
from rlx.rollout import HostFault, LocalHost, build_rollout_plan, sample_rollout_trees
from rlx.spec import EnvironmentRolloutSpec

DEADLINE = 2.0
FAULTS = {
    "raise": "ValueError: the game is",
    "exit": "process died (exit code 3)",
    "quit": "SystemExit: 0",
    "hang": f"deadline of {DEADLINE:g} s passed",
    "spin": f"deadline of {DEADLINE:g} s passed",
    "memory": "MemoryError: it may take 256 MiB",
    "nonsense": "gave str instead of a Step",
    "deep": "gave info that is not plain JSON",
    "unsendable": "gave a state that is not of plain values",
}


def grown(host):
    said = {"environment": {"plugin": "game"}, "num_generations": 2, "max_turns": 5}
    plan = build_rollout_plan(EnvironmentRolloutSpec.model_validate(said))
    names = ("good", "bad", "well")
    problems = [Problem(id=name, prompt=name, fields={"name": name}) for name in names]
    session = Hashing(("one", "two", "three"))
    return sample_rollout_trees(plan, problems, [1, 2, 3], session, Characters(), host)


def hosted(pool, **options):
    # On a crowded machine, whatever is not meant to miss it may take longer.
    deadline = DEADLINE if options.get("how") in ("hang", "spin") else 60.0
    return PooledHost(Misbehaving(**options), pool, deadline)


def without_process(tree):
    return [{k: v for k, v in s.info.items() if k != "process"} for s in tree.segments]


def test_workers_give_what_this_process_would(pool):
    there, here = grown(hosted(pool)), grown(LocalHost(Misbehaving()))
    for one, other in zip(there, here, strict=True):
        assert [s.token_ids for s in one.segments] == [s.token_ids for s in other.segments]
        assert without_process(one) == without_process(other)
        assert len(one.segments) == 1 + 2 * 5
    processes = {s.info["process"] for t in there for s in t.segments if "process" in s.info}
    assert processes
    own = {s.info["process"] for t in here for s in t.segments if "process" in s.info}
    assert not own & processes


@pytest.mark.parametrize("how", sorted(FAULTS))
def test_a_fault_is_told_and_ends_its_rollout_alone(how, pool):
    trees = grown(hosted(pool, how=how, on=2))
    usual = grown(hosted(pool))
    for tree, other in zip(trees, usual, strict=True):
        if tree.problem.id != "bad":
            assert without_process(tree) == without_process(other)
            continue
        for first, seen, failed, fault in (tree.segments[1:5], tree.segments[5:9]):
            assert first.kind == "say"
            assert seen.text == "go on"
            assert (failed.kind, failed.turn) == (FAILED, 2)
            assert FAULTS[how] in fault.info["fault"]
        assert len(tree.segments) == 9


@pytest.mark.parametrize("how", ["raise", "exit", "hang"])
def test_one_that_cannot_begin_is_told_likewise(how, pool):
    _, bad, _ = grown(hosted(pool, how=how, on=0))
    assert not bad.policy_segments
    assert all(FAULTS[how] in s.info["fault"] for s in bad.segments[1:])


def test_a_state_that_cannot_be_sent_to_a_worker_is_a_fault(pool):
    (fault,) = hosted(pool).step([(lambda: None, Action(text="a"))])
    assert isinstance(fault, HostFault)
    assert "cannot be sent to a worker" in fault.reason
