"""Two hundred live sessions at once, whose workers are killed while they wait and play."""

import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
from speech import Characters, Hashing

sys.path.insert(0, str(Path(__file__).parent))  # spawned workers inherit it

from wandering_worlds import Wandering

from rlx.plugin import Problem
from rlx.reward import RewardPool, SessionHost
from rlx.rollout import LocalHost, build_rollout_plan, sample_rollout_trees
from rlx.spec import EnvironmentRolloutSpec

PROBLEMS, COUNT, TURNS = 50, 4, 6
SPEC = EnvironmentRolloutSpec.model_validate(
    {"environment": {"plugin": "wandering"}, "num_generations": COUNT, "max_turns": TURNS}
)


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


def sample(host):
    plan = build_rollout_plan(SPEC, replayable=True)
    problems = [
        Problem(id=f"{n}", prompt=f"{n}?", fields={"name": f"{n}"}) for n in range(PROBLEMS)
    ]
    session = Hashing(("left", "right", "straight"))
    return sample_rollout_trees(plan, problems, range(PROBLEMS), session, Characters(), host)


def hosted(pool, every, whom="worker"):
    limits = SPEC.resolve_limits(replayable=True)
    return Killing(Wandering(), pool, limits, every=every, whom=whom)


def chains(tree):
    """The segments of every rollout, without the processes that played them."""
    found = []
    for segment in tree.segments[1:]:
        if segment.parent == 0:
            found.append([])
        info = {key: value for key, value in segment.info.items() if key != "process"}
        found[-1].append(replace(segment, parent=0, info=info))
    return found


def test_none_is_lost_doubled_or_crossed():
    here = sample(LocalHost(Wandering()))
    with RewardPool(workers=4, memory_mb=512) as pool:
        host = hosted(pool, 61)
        there = sample(host)
        assert len(host.killed) >= 5
        cutting = hosted(pool, 401, "keeper")
        cut = sample(cutting)
        assert len(cutting.killed) >= 2
    assert [chains(tree) for tree in there] == [chains(tree) for tree in here]
    assert [chains(tree) for tree in cut] == [chains(tree) for tree in here]
    assert sum(len(chains(tree)) for tree in there) == PROBLEMS * COUNT
