"""Scorers: rewards and environments on other nodes of a Ray cluster than the ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import guests
import hostile_rewards
import psutil
import pytest
from engines import has_ended
from hostile_rewards import length
from patience import LIMIT, wait_until
from pool_promises import *  # noqa: F403  (tests)
from pool_promises import job, value
from raylets import open_driver, open_ray_cluster, open_scorers

from rlx.launch import open_launcher
from rlx.record import find_run_differences
from rlx.spec import RunnerSpec

TESTS = Path(__file__).parents[1]
QUIET = {"tracking.mlflow": "null", "tracking.pictures": "false"}


@pytest.fixture(scope="module")
def cluster():
    with open_ray_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def pool(cluster, tmp_path_factory):
    path = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with open_scorers(cluster, tmp_path_factory.mktemp("run"), 2, PYTHONPATH=path) as pool:
        yield pool


def find_scorer(pool):
    """The process of one scorer: it keeps a worker, which keeps the process that runs plugins."""
    (outcome,) = pool.score([job(hostile_rewards.process(), "x")])
    return psutil.Process(int(value(outcome))).parent().parent()


def test_both_scorers_work(pool):
    jobs = [job(hostile_rewards.process(), "x") for _ in range(64)]
    assert len({value(outcome) for outcome in pool.score(jobs)}) == 2


def test_a_scorer_that_is_killed_is_started_again_and_asked_again(pool):
    scorer = find_scorer(pool)
    assert "Scorer" in " ".join(scorer.cmdline())
    below = scorer.children(recursive=True)
    jobs = [job(hostile_rewards.nap(seconds=0.1), "x") for _ in range(24)]
    jobs += [job(hostile_rewards.kill_once(pid=scorer.pid), "x")]
    assert [value(outcome) for outcome in pool.score(jobs)] == [1.0] * 25
    wait_until("it to be gone", lambda: has_ended(scorer))
    wait_until("what it started to be gone", lambda: all(map(has_ended, below)))


def test_a_job_that_always_ends_its_scorer_fails_alone(pool):
    jobs = [job(length(), "abc"), job(hostile_rewards.kill_scorer(), "x"), job(length(), "ab")]
    first, second, third = pool.score(jobs)
    assert (value(first), value(third)) == (3.0, 2.0)
    assert second.fault.startswith("cannot be run by a worker: ActorUnavailableError")


def test_other_jobs_of_a_scorer_that_is_ended_are_done_later(pool):
    """They lose their scorer as often as the job that ends it."""
    jobs = [job(hostile_rewards.nap(seconds=2.0), "x") for _ in range(2)]
    jobs = [jobs[0], job(hostile_rewards.kill_scorer(), "x"), jobs[1]]
    first, second, third = pool.score(jobs)
    assert (value(first), value(third)) == (1.0, 1.0)
    assert second.fault is not None


def test_a_scorer_that_cannot_start_says_why(cluster, tmp_path):
    with (
        pytest.raises(ConnectionError, match=r"scorer 0 cannot start: .*reward workers cannot"),
        open_driver(cluster, tmp_path, 1, PYTHONHOME="/nowhere"),
    ):
        pass


LOST = """
import json, sys
from rlx.reward.actors import ActorPool
from pool_promises import job
import hostile_rewards
if __name__ == "__main__":
    pool = ActorPool(json.loads(sys.argv[1]), 0)
    print("begun", flush=True)
    pool.score([job(hostile_rewards.nap(seconds=3600), "x", deadline=7200)])
"""


def test_the_end_of_the_driver_is_no_fault_of_a_reward(cluster, tmp_path):
    """It takes the scorers with it, and the ranks, which start again from their checkpoint."""
    path = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with open_driver(cluster, tmp_path, 1, PYTHONPATH=path) as (address, driver):
        rank = subprocess.Popen(
            [sys.executable, "-c", LOST, json.dumps(address)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert rank.stdout.readline() == "begun\n"
        driver.kill()
        _, said = rank.communicate(timeout=LIMIT)
    assert rank.returncode == 1
    assert "ConnectionError: a scorer is lost: ActorDiedError" in said


def test_a_run_with_scorers_that_lose_a_node_has_the_numbers_of_one_machine(
    own_home, cluster, tmp_path_factory
):
    """Its rewards and its environment run on other nodes than its ranks; one of them is lost."""
    paths = guests.importable("rlx-guess", tmp_path_factory.mktemp("guess"))
    paths = [*paths, own_home.environment["PYTHONPATH"]]
    own_home.environment["PYTHONPATH"] = os.pathsep.join(paths)
    spec = Path(__file__).with_name("many_turns.yaml")
    phases = "[{name: turn by turn, steps: 6}]"
    sets = {**QUIET, "runner.ranks": 2, "phases": phases, "critic": "null"}
    here = own_home.rlx("submit", spec, "-q", sets=sets)
    assert here.returncode == 0, here.stderr
    cluster.add_node(desk=2)
    cluster.add_node(bench=2)
    cluster.add_node(bench=2)
    ranks, scorers = "{CPU: 0.5, desk: 1}", "{count: 2, resources: {CPU: 0.5, bench: 1}}"
    launcher = f"{{kind: ray, address: '{cluster.address}', strategy: SPREAD, "
    launcher += f"resources: {ranks}, scorers: {scorers}}}"
    there = own_home.rlx(
        "submit", spec, "-qd", "--again", sets={**sets, "runner.launcher": launcher}
    )
    assert there.returncode == 0, there.stderr
    first, second = here.stdout.strip(), there.stdout.strip()
    own_home.until(lambda: own_home.run(second).step >= 1, "a step")
    cluster.kill_node(len(cluster.nodes) - 1)
    own_home.until(lambda: own_home.run(second).ended, "it to end")
    assert own_home.run(second).status == "finished", own_home.run(second).reason
    with own_home.registry() as registry:
        assert list(find_run_differences(registry, first, second)) == []
        kinds = [event.kind for event in registry.results.events(second)]
    assert "attempt_failed" not in kinds, "Ray started the scorer again, and the ranks went on"
    own_home.until(lambda: not own_home.processes(), "every process to end")


def test_a_run_with_scorers_stops_between_two_steps(own_home):
    """Its ranks have joined the cluster, and Ray's handlers of signals are not theirs."""
    sets = {**own_home.long, "runner.launcher": "{kind: ray, scorers: {count: 1}}"}
    run = own_home.rlx("submit", own_home.yaml, "-qd", sets=sets).stdout.strip()
    own_home.until(lambda: own_home.run(run).step >= 1, "a step")
    assert own_home.rlx("stop", run).returncode == 0
    own_home.until(lambda: own_home.run(run).ended, "it to end")
    ended = own_home.run(run)
    assert (ended.status, ended.attempt) == ("stopped", 1), ended.reason
    kept = (own_home.path / "runs" / run / "checkpoints").glob("step_*")
    assert max(int(path.name.removeprefix("step_")) for path in kept) == ended.step
    own_home.until(lambda: not own_home.processes(), "every process to end")


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        (
            "scorers: {count: 2, resources: {odd: 1}}",
            "can never hold 2 scorers, each with CPU 1, odd 1: there is room for 1",
        ),
        (
            "resources: {odd: 1}, scorers: {count: 1, resources: {odd: 1}}",
            "never hold 1 ranks and 1 scorers: together they take odd 2, and it has 1",
        ),
        ("scorers: {count: 0}", "must be at least 1, not 0"),
        ("scorers: {count: 1, resources: {CPU: 1.5}}", "Ray takes whole numbers above 1"),
    ],
)
def test_scorers_that_a_cluster_cannot_hold_are_refused(launcher, reason, own_home, cluster):
    launcher = f"{{kind: ray, address: '{cluster.address}', {launcher}}}"
    done = own_home.rlx("submit", own_home.yaml, sets={"runner.launcher": launcher})
    assert reason in done.stderr
    assert done.returncode in (2, 4)


def test_a_cluster_of_the_runs_own_has_no_other_resources_for_scorers():
    launcher = {"kind": "ray", "scorers": {"count": 1, "resources": {"odd": 1}}}
    (fault,) = open_launcher(RunnerSpec.model_validate({"launcher": launcher})).check()
    assert fault.path == ("runner", "launcher", "scorers", "resources", "odd")
