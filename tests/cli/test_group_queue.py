"""What the queue of a group leaves alone, over a registry filled by hand: no run is started."""

import os
from pathlib import Path

import pytest
from shown import silence

from rlx.cli import main
from rlx.cli.output import print_text
from rlx.launch import lifecycle
from rlx.launch.lifecycle import continue_run
from rlx.launch.run_access import attempts_used
from rlx_registry import RESUMED, Registry

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


def left(registry, capsys):
    """Why the one run is left alone."""
    capsys.readouterr()
    lifecycle.run_queue(registry, registry.url, ["r-0001"], 1, report=print_text)
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
    monkeypatch.setattr("rlx.launch.lifecycle.start_supervisor", lambda *_: os.getpid())
    assert continue_run(registry, lost, registry.url, reason="taken over")
    assert not continue_run(registry, lost, registry.url, reason="taken over")
    assert [change.reason for change in registry.history("r-0001")].count("taken over") == 1


def test_a_user_who_resumes_a_run_gives_it_all_attempts_again(registry):
    assert registry.start("r-0001", {"queued"})
    assert registry.transition("r-0001", {"running"}, "stopped")
    assert attempts_used(registry, "r-0001") == 1
    assert registry.transition("r-0001", {"stopped"}, "queued", RESUMED)
    assert attempts_used(registry, "r-0001") == 0


def test_a_run_that_is_removed_does_not_end_it(registry, monkeypatch, capsys):
    def remove_first(_registry, run, *_, **__):
        assert registry.transition(run.id, {"queued"}, "stopped")
        registry.delete_run(run.id)
        return registry.run(run.id)

    monkeypatch.setattr(lifecycle, "continue_run", remove_first)
    assert "r-0001 skipped: it has just been removed" in left(registry, capsys)
