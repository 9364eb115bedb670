"""Two hundred live sessions at once, whose workers are killed while they wait and play."""

import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from speech import Characters, Hashing

sys.path.insert(0, str(Path(__file__).parent))  # spawned workers inherit it

from wandering_worlds import Live, Wandering

from rlx.plugin import Problem
from rlx.reward import RewardPool, SessionHost
from rlx.rollout import LocalHost, build_rollout_plan, sample_rollout_trees
from rlx.spec import EnvironmentRolloutSpec

PROBLEMS, COUNT, TURNS = 50, 4, 6
SETTINGS = {"environment": {"plugin": "wandering"}, "num_generations": COUNT, "max_turns": TURNS}


class Killing(SessionHost):
    """Kills the worker of every so-manieth answer, or its keeper."""

    def __init__(self, *given, every, whom="worker"):
        super().__init__(*given)
        self.every, self.whom, self.seen, self.killed = every, whom, 0, []

    def collect(self, seconds):
        answers = super().collect(seconds)
        for _, answer in answers:
            self.seen += 1
            if self.seen % self.every == 0 and hasattr(answer, "info"):
                with suppress(ProcessLookupError, psutil.NoSuchProcess):
                    worker = psutil.Process(answer.info["process"])
                    killed = worker.pid if self.whom == "worker" else worker.ppid()
                    os.kill(killed, signal.SIGKILL)
                    self.killed.append(killed)
        return answers


def sample(host, replayable):
    plan = build_rollout_plan(
        EnvironmentRolloutSpec.model_validate(SETTINGS), replayable=replayable
    )
    problems = [
        Problem(id=f"{n}", prompt=f"{n}?", fields={"name": f"{n}"}) for n in range(PROBLEMS)
    ]
    session = Hashing(("left", "right", "straight"))
    return sample_rollout_trees(plan, problems, range(PROBLEMS), session, Characters(), host)


def hosted(folder, pool, world, every, whom="worker", patience=None, **live):
    spec = EnvironmentRolloutSpec.model_validate({**SETTINGS, "live": live, "patience": patience})
    limits = spec.resolve_limits(replayable=world.replayable)
    return Killing(world(folder=str(folder)), pool, limits, every=every, whom=whom)


def chains(tree):
    """The segments of every rollout, without the processes that played them."""
    found = []
    for segment in tree.segments[1:]:
        if segment.parent == 0:
            found.append([])
        info = {key: value for key, value in segment.info.items() if key != "process"}
        found[-1].append(replace(segment, parent=0, info=info))
    return found


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    return tmp_path


def test_none_is_lost_doubled_or_crossed_where_sessions_can_be_replayed(folder):
    here = sample(LocalHost(Wandering(folder=str(folder / "here"))), True)
    with RewardPool(workers=4, memory_mb=512) as pool:
        host = hosted(folder / "there", pool, Wandering, 61)
        there = sample(host, True)
        assert len(host.killed) >= 5
        cutting = hosted(folder / "there", pool, Wandering, 401, "keeper")
        cut = sample(cutting, True)
        assert len(cutting.killed) >= 2
    assert [chains(tree) for tree in there] == [chains(tree) for tree in here]
    assert [chains(tree) for tree in cut] == [chains(tree) for tree in here]
    assert sum(len(chains(tree)) for tree in there) == PROBLEMS * COUNT


def test_one_that_cannot_be_replayed_costs_its_own_rollout(folder):
    here = sample(LocalHost(Wandering(folder=str(folder / "here"))), True)
    with RewardPool(workers=1, memory_mb=512) as pool:
        host = hosted(folder / "there", pool, Live, 61, sessions=25, patience=0.02)
        there = sample(host, False)
    outcomes = Counter()
    for tree, other in zip(there, here, strict=True):
        for chain, usual in zip(chains(tree), chains(other), strict=True):
            if "fault" in chain[-1].info:
                outcomes["lost"] += 1
                assert chain[-1].info["on_error"] == "drop_sample"
                reason = chain[-1].info["fault"]
                assert "process died (signal 9)" in reason or "SessionLostError" in reason
                assert chain[:-2] == usual[: len(chain) - 2]
            else:
                outcomes["whole"] += 1
                assert chain == usual
    assert outcomes["whole"] + outcomes["lost"] == PROBLEMS * COUNT
    assert 1 <= outcomes["lost"] <= len(host.killed)
    # What is left open are the sessions whose processes were killed.
    left = {int(path.name.rsplit("-", 1)[1]) for path in (folder / "there").iterdir()}
    assert left <= set(host.killed)
