"""Ten steps of the whole job with vLLM: unbroken, and with its worker killed on the way."""

import os
import signal
from pathlib import Path

import pytest
from engines import needs_vllm

pytestmark = [needs_vllm]

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"
SETS = {
    "sampler": "{engine: vllm, kv_cache_mb: 32}",
    "phases.0.steps": 3,
    "phases.1.steps": 7,
    "tracking.mlflow": "null",
    "tracking.pictures": "false",
    "runner.max_attempts": 1,
}


def workers(home):
    """Processes of vLLM, by the folder of their run's home."""
    return [p for p in home.processes() if b"vllm_worker" in cmdline(p)]


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def runs(own_home):
    """The same experiment twice; of the second, the worker is killed after three steps."""
    whole = submitted(own_home, "unbroken")
    broken = submitted(own_home, "killed")
    own_home.until(lambda: own_home.run(broken).step >= 3, "three steps")
    (worker,) = workers(own_home)
    os.kill(worker, signal.SIGKILL)
    own_home.until(lambda: own_home.run(broken).ended, "the broken run to end")
    own_home.until(lambda: not own_home.processes(), "every process to end")
    return {"unbroken": own_home.run(whole), "killed": own_home.run(broken)}


def submitted(home, name):
    """A run that has started, and the ones before it have ended."""
    done = home.rlx("submit", QUICK, "-qd", "--again", sets={**SETS, "name": name})
    assert done.returncode == 0, done.stderr
    if name == "unbroken":
        home.until(lambda: not home.processes(), "it to end")
    return done.stdout.strip()


def figures(home, run, name):
    with home.registry() as registry:
        return [value for _, value in registry.results.metrics(run.id, [name])[name]]


@pytest.mark.parametrize("name", ["unbroken", "killed"])
def test_ten_steps_are_taken_and_the_sampler_stays_the_learner(own_home, runs, name):
    run = runs[name]
    assert (run.status, run.step) == ("finished", 10), run.reason
    drift = figures(own_home, run, "sampler/drift")
    assert len(drift) == 10
    assert max(drift) <= 5e-5
    assert figures(own_home, run, "sampler/restarts")[-1] == (name == "killed")


def test_a_killed_worker_changes_nothing(own_home, runs):
    """But rounding, where a prompt that was in the prefix cache is read again."""

    def said(run):
        return [
            segment["token_ids"]
            for _, trees, _ in own_home.bodies(run)
            for tree in trees
            for segment in tree["segments"]
            if segment["author"] == "policy"
        ]

    whole, broken = said(runs["unbroken"]), said(runs["killed"])
    same = sum(one == other for one, other in zip(whole, broken, strict=True))
    assert len(whole) > 500
    assert same >= 0.95 * len(whole)
