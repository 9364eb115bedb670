"""Runs that take turns: for devices, in the queue, and when a supervisor wakes up too late."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from patience import LIMIT

from rlx.launch import find_run_differences, is_supervisor
from rlx_registry import Registry


@pytest.fixture(scope="module")
def place(own_home):
    """A home on a machine with one device."""
    own_home.environment["RLX_DEVICES"] = "cpu:0"
    return own_home


def sets(home, **named):
    return {**home.brief, **named}


def submit(home, *options, **named):
    return home.submit(*options, sets=sets(home, **named))


def test_a_second_run_waits_for_the_device_of_the_first(place):
    first = submit(place, "-d", name="first", **{**place.long, "seed": 1})
    place.until(lambda: place.run(first).step >= 1, "it to train")
    second = submit(place, "-d", name="second")
    place.until(lambda: waiting(place, second), "the second to say that it waits")
    assert first in waiting(place, second) and place.run(second).status == "submitted"
    queued = submit(place, "--queue", name="queued", seed=2)
    assert place.run(queued).status == "queued"

    place.freeze(*place.ranks(first))  # it can take no step any more
    said = [place.rlx("stop", first).stdout for _ in range(2)]
    assert "repeat to stop it immediately" in said[0]
    assert "immediately, without a checkpoint" in said[1]
    place.until(lambda: place.run(first).status == "stopped", "it to be stopped at once")
    assert place.run(first).reason == "killed on request"
    place.until(lambda: place.run(second).status == "finished", "the second to have its turn")
    assert place.run(queued).status == "queued"

    resumed = place.rlx("resume", queued)
    assert resumed.returncode == 0, resumed.stderr
    assert place.run(queued).status == "finished"
    place.until(lambda: not place.processes(), "every process to end")


def waiting(home, run_id):
    return "".join(e.message for e in home.events(run_id) if e.kind == "waiting")


def test_a_run_that_has_ended_frees_its_slot_while_mlflow_hangs(place):
    with socket.create_server(("127.0.0.1", 0)) as server:  # which never answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        mirror = {"tracking.mlflow": url, "phases.0.steps": 1, "phases.1.steps": 1}
        group = ("submit", place.yaml, "--seeds", "6..7", "--group", "pair")
        with place.begin(*group, sets=sets(place, **mirror)) as following:

            def find_pair():
                with place.registry() as registry:
                    runs = sorted(registry.runs(group="pair"), key=lambda run: run.seed)
                return [run.id for run in runs] if len(runs) == 2 else None

            first, second = place.until(find_pair, "both to be recorded")
            place.until(lambda: place.run(second).status != "queued", "the second to be taken")
            ended = place.run(first)
            assert ended.status == "finished"
            assert is_supervisor(ended.pid, first)  # it still waits for MLflow
            place.until(lambda: place.run(second).status == "finished", "the second to finish")
            server.close()
            _, err = following.communicate(timeout=LIMIT)
    assert following.returncode == 0, err
    place.until(lambda: not place.processes(), "every process to end")
    with place.registry() as registry:
        for run_id in (first, second):
            (behind,) = [
                e.message for e in registry.results.events(run_id) if e.kind == "tracker_behind"
            ]
            assert "`rlx check --repair` sends the rest" in behind


def test_a_supervisor_that_wakes_up_too_late_writes_nothing_and_leaves(place):
    """As on a machine that slept, or was cut off, while another took its run over."""
    del place.environment["RLX_DEVICES"]
    slow = {**place.unhurried, **place.held, "seed": 5}
    unbroken = submit(place, **slow)
    place.hold()
    run_id = submit(place, "-d", "--again", **slow)
    ranks = place.await_ranks(run_id)
    asleep = [place.run(run_id).pid, *ranks]
    place.release()
    place.until(lambda: place.run(run_id).step >= 1, "it to train")
    place.freeze(*asleep)
    with Registry.open(f"sqlite:///{place.path}/registry.db") as registry:
        assert registry.transition(run_id, {"running"}, "submitted", "taken over elsewhere")
        url = registry.url
    log = Path(place.run(run_id).directory) / "run.log"
    with log.open("ab") as out:
        later = subprocess.Popen(
            [sys.executable, "-m", "rlx.launch.supervisor", run_id],
            env={**place.environment, "RLX_RUN_REGISTRY": url},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    place.until(lambda: place.run(run_id).attempt == 2, "the later one to start")
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    place.until(lambda: not set(asleep) & set(place.running()), "the former one to leave")
    assert later.wait(300) == 0
    assert "exiting: run " in log.read_text()
    with place.registry() as registry:
        assert [c.after for c in registry.history(run_id)][-2:] == ["running", "finished"]
        assert list(find_run_differences(registry, unbroken, run_id)) == []
    place.until(lambda: not place.processes(), "every process to end")
