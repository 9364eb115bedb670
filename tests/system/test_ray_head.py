"""The head of a Ray cluster that is lost while a run uses it: for a while, for good, or replaced.

Ray's processes are real. The clusters are these tests' own, since nothing of one is left without
its head.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from patience import LIMIT
from raylets import open_ray_cluster

from rlx.record import find_run_differences

SLOW = {"rewards.turn.unhurried": "{plugin: unhurried, turn: answer, seconds: 0.05}"}
"""Makes a step last a second and more, in which the processor is idle, until the run is held."""
PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"


def build_sets(home, **others):
    steps = {"model.warm_start.steps": 10, "phases.1.steps": 8, "runner.ranks": 2}
    return {**home.brief, **SLOW, **home.held, **steps, "runner.checkpoint": "{every: 1}", **others}


@pytest.fixture(scope="module")
def place(own_home):
    """A home with a run of two ranks on this machine, and Ray's patience of ten seconds."""
    own_home.environment[PATIENCE] = "10"
    done = own_home.rlx("submit", own_home.yaml, "-q", sets=build_sets(own_home))
    assert done.returncode == 0, done.stderr
    own_home.unbroken = done.stdout.strip()
    return own_home


@pytest.fixture(autouse=True)
def let_go(place):
    """Whatever a test has come to, the next one's run is not held."""
    yield
    place.release()


def submit(home, address, **sets):
    """Starts the same on two nodes of a cluster; returns when it trains, and holds it there."""
    launcher = f"{{kind: ray, address: '{address}', strategy: STRICT_SPREAD}}"
    return submit_held(home, **{"runner.launcher": launcher, **sets})


def submit_held(home, **sets):
    sets = build_sets(home, **sets)
    done = home.rlx("submit", home.yaml, "-qd", "--again", sets=sets)
    assert done.returncode == 0, done.stderr
    await_training(home, run := done.stdout.strip())
    return run


def await_training(home, run):
    home.until(lambda: home.run(run).step > 1 or home.run(run).ended, "it to train")
    home.hold()  # it could be over before its head is missed, which takes seconds
    assert not home.run(run).ended, home.run(run).reason


def read_log(home, run):
    return (Path(home.run(run).directory) / "run.log").read_text()


def list_failures(home, run):
    with home.registry() as registry:
        events = registry.results.events(run)
        return [event.message for event in events if event.kind == "attempt_failed"]


def is_head(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).name() == "gcs_server"


def require_same_numbers(home, run):
    """Lets a run go on that is held."""
    home.release()
    home.until(lambda: home.run(run).ended, "it to end")
    assert home.run(run).status == "finished", home.run(run).reason
    with home.registry() as registry:
        assert list(find_run_differences(registry, home.unbroken, run)) == []
    home.until(lambda: not home.processes(), "every process to end")


def test_a_run_waits_for_the_cluster_that_takes_the_place_of_a_lost_one(place):
    with open_ray_cluster() as cluster:
        run = submit(place, cluster.address)
        cluster.kill_head(node=True)
        (reason,) = place.until(lambda: list_failures(place, run), "the attempt to end")
        assert f"the head of the Ray cluster, {cluster.address}, was lost" in reason
        waiting = f"waiting at most 3600 s for a Ray cluster at {cluster.address}: no Ray cluster"
        place.until(lambda: waiting in read_log(place, run), "the next attempt to wait")
        cluster.replace()
        require_same_numbers(place, run)
        assert place.run(run).attempt == 2


def test_a_run_whose_cluster_never_returns_fails_and_is_resumed_on_another(place):
    with open_ray_cluster() as cluster:
        run = submit(place, cluster.address, **{"runner.hang_after": 90})
        cluster.kill_head(node=False)
        place.until(lambda: place.run(run).ended, "it to fail")
        assert place.run(run).status == "failed"
        reason = place.run(run).reason
        assert f"no Ray cluster came back at {cluster.address} within 90 s" in reason
        assert "`rlx resume` continues the run" in reason
        (failure,) = list_failures(place, run)
        assert failure.endswith(f"{cluster.address}, was lost: it does not answer")
        place.until(lambda: not place.processes(), "every process to end")
        resumed = place.begin("resume", run)
        place.until(lambda: read_log(place, run).count("waiting at most") == 2, "it to wait again")
        cluster.replace()
        require_same_numbers(place, run)
        _, text = resumed.communicate(timeout=LIMIT)
        assert resumed.returncode == 0, text


def test_a_run_goes_on_without_a_head_that_returns_as_it_was(place, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path))
    monkeypatch.setitem(place.environment, PATIENCE, "600")
    with open_ray_cluster() as cluster:
        run = submit(place, cluster.address)
        cluster.kill_head(node=False)
        silent = f"the head of the Ray cluster, {cluster.address}, does not answer"
        place.until(lambda: silent in read_log(place, run), "it to be missed")
        step = place.run(run).step
        place.release()
        place.until(lambda: place.run(run).step > step, "the ranks to go on")
        place.hold()
        cluster.restart_head()
        place.until(lambda: f"{cluster.address}, answers again" in read_log(place, run), "it")
        require_same_numbers(place, run)
        assert place.run(run).attempt == 1


def test_a_new_head_at_the_same_address_is_not_taken_for_the_lost_one(place, monkeypatch):
    monkeypatch.setitem(place.environment, PATIENCE, "600")
    with open_ray_cluster() as cluster:
        run = submit(place, cluster.address)
        cluster.kill_head(node=False)
        place.until(lambda: "does not answer" in read_log(place, run), "it to be missed")
        cluster.restart_head()
        (reason,) = place.until(lambda: list_failures(place, run), "the attempt to end")
        assert reason.endswith("was lost: a new cluster answers at its address")
        cluster.replace()
        require_same_numbers(place, run)


def test_a_run_whose_own_cluster_loses_its_head_starts_another(place):
    run = submit_held(place, **{"runner.launcher": "ray"})
    (head,) = filter(is_head, place.processes())
    os.kill(head, signal.SIGKILL)
    (reason,) = place.until(lambda: list_failures(place, run), "the attempt to end")
    assert reason.endswith("was lost: it does not answer")
    require_same_numbers(place, run)
    assert place.run(run).attempt == 2


def test_a_run_that_waits_for_a_cluster_is_stopped_at_once(place):
    with open_ray_cluster() as cluster:
        run = submit(place, cluster.address)
        cluster.kill_head(node=True)
        place.until(lambda: "waiting at most" in read_log(place, run), "the next attempt to wait")
        assert place.rlx("stop", run).returncode == 0
        place.until(lambda: place.run(run).ended, "it to end")
        assert place.run(run).status == "stopped"
        place.until(lambda: not place.processes(), "every process to end")
