"""What the queue of a group leaves alone, over a registry filled by hand: no run is started."""

import json
import os
from pathlib import Path

import psutil
import pytest
from shown import silence

from rlx.cli import main
from rlx.cli.output import print_text
from rlx.launch import is_abandoned, is_supervisor, queue, this_machine
from rlx.launch.start_stop import attempts_used, take_over_run
from rlx.stopwatch import Clock
from rlx_registry import (
    RESUMED,
    Registry,
    record_supervisor,
)

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def queued(folder):
    """A run in the queue, and its folder."""
    assert main(["submit", str(QUICK), "--queue", "-q"]) == 0
    return folder / "home" / "runs" / "r-0001"


@pytest.fixture
def registry(folder, queued):
    with Registry.open(f"sqlite:///{folder}/home/registry.db") as opened:
        yield opened


def work_off(registry):
    queue.run_queue(registry, registry.url, 1, once=True, report=print_text)


def left(registry, capsys):
    """Why the one run is left alone."""
    capsys.readouterr()
    work_off(registry)
    assert registry.run("r-0001").attempt == 0 or registry.run("r-0001").status != "running"
    return capsys.readouterr().err


def test_a_run_whose_folder_is_elsewhere(registry, queued, capsys):
    queued.rename(queued.with_name("away"))
    assert "r-0001 skipped: its folder is not on this machine" in left(registry, capsys)


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_folder_that_cannot_be_read_does_not_end_it(registry, queued, capsys, content):
    (queued / "spec.json").write_text(content)
    assert "r-0001 skipped: " in left(registry, capsys)
    assert registry.run("r-0001").status == "queued"


def test_a_folder_at_the_same_path_of_another_registrys_run(registry, folder, queued, capsys):
    said = ["--set", "evaluation.problems=7", "--set", f"tracking.registry=sqlite:///{folder}/x.db"]
    assert main(["submit", str(QUICK), "--queue", "-q", *said]) == 0
    other = queued.with_name("r-0001.2")
    (queued / "spec.json").write_text((other / "spec.json").read_text())
    assert "the folder here belongs to another registry's run" in left(registry, capsys)


def test_more_ranks_than_devices(registry, queued, capsys, monkeypatch):
    monkeypatch.setenv("RLX_DEVICES", "cpu:0")
    spec = queued / "spec.json"
    spec.write_text(spec.read_text().replace('"ranks": 1', '"ranks": 2'))
    assert "2 ranks" in left(registry, capsys)


def test_a_lost_run_that_was_asked_to_stop_is_stopped(registry, capsys):
    assert registry.transition("r-0001", {"queued"}, "submitted")
    assert registry.start("r-0001", {"submitted"})
    assert registry.leave_request("r-0001", "stop")
    assert registry.transition("r-0001", {"running"}, "lost")
    assert "it was asked to stop" in left(registry, capsys)
    assert registry.run("r-0001").status == "stopped"


def test_a_lost_run_without_attempts_left_until_it_is_stopped(registry, capsys):
    assert registry.transition("r-0001", {"queued"}, "submitted")
    for _ in range(3):
        assert registry.start("r-0001", {"submitted", "running"})
    assert registry.transition("r-0001", {"running"}, "lost")
    assert "it is lost after 3 attempts" in left(registry, capsys)
    assert main(["stop", "r-0001"]) == 0
    assert registry.run("r-0001").status == "stopped"


def test_of_two_that_take_over_a_lost_run_one_gets_it(registry, monkeypatch):
    assert registry.transition("r-0001", {"queued"}, "submitted")
    registry.update_run("r-0001", host="another", pid=7)
    silence(registry, "r-0001")
    lost = registry.run("r-0001")
    monkeypatch.setattr("rlx.launch.start_stop.start_supervisor", lambda *_: os.getpid())
    assert take_over_run(registry, lost, registry.url, "taken over") == os.getpid()
    assert take_over_run(registry, lost, registry.url, "taken over") is None
    assert [change.reason for change in registry.history("r-0001")].count("taken over") == 1


def test_a_user_who_resumes_a_run_gives_it_all_attempts_again(registry):
    assert registry.start("r-0001", {"queued"})
    assert registry.transition("r-0001", {"running"}, "stopped")
    assert attempts_used(registry, "r-0001") == 1
    assert registry.transition("r-0001", {"stopped"}, "queued", RESUMED)
    assert attempts_used(registry, "r-0001") == 0


def test_a_run_that_is_removed_does_not_end_it(registry, monkeypatch, capsys):
    def remove_first(_registry, run, *_):
        assert registry.transition(run.id, {"queued"}, "stopped")
        registry.delete_run(run.id)
        return registry.run(run.id)

    monkeypatch.setattr(queue, "take_over_run", remove_first)
    work_off(registry)
    assert "r-0001 skipped: it has just been removed" in capsys.readouterr().err


class Taken(Exception):
    """The queue has taken over a run."""


def tell_time(pause):
    """A clock on which time passes in pauses alone, of which each calls `pause`."""
    passed = [0.0]

    def wait(seconds):
        passed[0] += seconds
        pause()

    return Clock(lambda: passed[0], wait)


def test_a_run_whose_machine_has_a_clock_that_is_behind(registry, monkeypatch):
    """Its heartbeats look old, and go on; it is taken over once they stop."""
    assert registry.transition("r-0001", {"queued"}, "submitted")
    registry.update_run("r-0001", host="another", pid=7)
    assert registry.start("r-0001", {"submitted"})
    silence(registry, "r-0001")
    beats = iter(range(900, 700, -10))

    def beat():
        if (ago := next(beats, None)) is not None:
            silence(registry, "r-0001", ago)

    def take(_registry, run, *_):
        raise Taken(run.id)

    monkeypatch.setattr(queue, "take_over_run", take)
    with pytest.raises(Taken):
        queue.run_queue(registry, registry.url, 1, once=False, clock=tell_time(beat))
    assert next(beats, None) is None


def test_a_supervisor_in_another_container_of_this_machine_is_not_taken_for_dead(
    registry, queued, monkeypatch
):
    """Its process id means nothing here, so that its heartbeats count."""
    assert registry.transition("r-0001", {"queued"}, "submitted")
    registry.update_run("r-0001", host=this_machine(), pid=2**22 + 1)
    assert registry.start("r-0001", {"submitted"})
    assert is_abandoned(registry.run("r-0001"))
    record_supervisor(queued, os.getpid())
    description = queued / "supervisor.json"
    elsewhere = json.loads(description.read_text()) | {"namespace": "pid:[1]"}
    description.write_text(json.dumps(elsewhere))
    assert not is_abandoned(registry.run("r-0001"))
    silence(registry, "r-0001")
    assert is_abandoned(registry.run("r-0001"))

    def take(_registry, run, *_):
        raise Taken(run.id)

    monkeypatch.setattr(queue, "take_over_run", take)
    pauses = []
    with pytest.raises(Taken):
        clock = tell_time(lambda: pauses.append(1))
        queue.run_queue(registry, registry.url, 1, once=False, clock=clock)
    assert len(pauses) == 26, "taken over after more than 25 s of silence"


def test_a_supervisor_that_is_just_being_started_is_one(monkeypatch):
    """The kernel shows no command line while a process becomes another program."""
    lines = iter([[], [], ["python", "-m", "rlx.launch.supervisor", "r-0001"]])
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: next(lines))
    assert is_supervisor(os.getpid(), "r-0001")
