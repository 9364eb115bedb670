"""The verbs around runs, over a registry that was filled by hand: no run is started."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from patience import LIMIT, stop_process
from submissions import index_row, submit

from rlx.cli import main
from rlx.cli.follow import follow_run
from rlx.evaluation import measure_calibration
from rlx_registry import IDLE_STEPS, Registry, record_supervisor

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"


pytestmark = pytest.mark.usefixtures("folder")


def submitted(registry, folder, rollouts="all", name="n", **spec):
    run = submit(
        registry, digest=name, name=name, spec={"tracking": {"rollouts": rollouts}, **spec}
    )
    root = folder / "home" / "runs" / run.id
    root.mkdir(parents=True)
    registry.update_run(run.id, directory=root)
    return run.id


def running(registry, folder, pid, **spec):
    run_id = submitted(registry, folder, **spec)
    registry.transition(run_id, {"submitted"}, "running")
    registry.update_run(run_id, pid=pid)
    described = folder / "home" / "runs" / run_id / "supervisor.json"
    record_supervisor(described.parent, os.getpid())
    described.write_text(json.dumps(json.loads(described.read_text()) | {"pid": pid}))
    return run_id


@pytest.fixture
def dead():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_no_rollouts_says_why(registry, folder, capsys):
    submitted(registry, folder, rollouts="none")
    assert main(["samples"]) == 2
    assert "tracking.rollouts: none" in capsys.readouterr().err
    ended = submitted(registry, folder, name="other")
    assert main(["samples"]) == 2
    assert capsys.readouterr().err.endswith("no rollouts yet\n")
    registry.transition(ended, {"submitted"}, "stopped")
    assert main(["samples"]) == 2
    assert capsys.readouterr().err.endswith("no rollouts\n")


def test_rollouts_whose_file_is_missing(registry, folder, capsys):
    run_id = submitted(registry, folder)
    place = {"path": "x", "sha256": "x", "bytes": 1, "statistics": {}}
    registry.results.add_rollouts(run_id, 1, **place, index=[index_row()])
    assert main(["samples", "--group", "0"]) == 5
    assert "cannot read body x" in capsys.readouterr().err


def test_another_registry_for_writers_and_readers_alike(folder, monkeypatch, capsys):
    monkeypatch.setenv("RLX_REGISTRY", f"sqlite:///{folder}/other.db")
    assert main(["submit", str(RLCR), "--queue", "-q"]) == main(["status", "rlcr", "--json"]) == 0
    assert not (folder / "home" / "registry.db").exists()
    written = f"tracking.registry=sqlite:///{folder}/third.db"
    assert main(["submit", str(RLCR), "--queue", "-q", "--set", written]) == 0
    assert (folder / "third.db").exists()


def test_stopping_a_run_without_supervisor_ends_the_ranks_it_left(registry, folder, dead, capsys):
    run_id = running(registry, folder, dead)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)", "-m", "rlx.launch.rank"]
    left = subprocess.Popen([*sleep, str(folder / "home" / "runs" / run_id), run_id])
    other = subprocess.Popen([*sleep, str(folder / "elsewhere" / run_id), run_id])
    try:
        assert main(["stop", run_id]) == 0
        assert left.wait(LIMIT) != 0
        assert other.poll() is None
    finally:
        stop_process(left)
        stop_process(other)
    assert registry.run(run_id).reason == "its supervisor was gone"
    assert "marked as stopped" in capsys.readouterr().err
    assert main(["stop", run_id]) == 2


def test_a_run_that_begins_while_it_is_being_stopped(registry, folder, capsys, monkeypatch):
    run_id = submitted(registry, folder)
    change = Registry.transition

    def begin_first(self, run, expect, to, reason=None):
        monkeypatch.setattr(Registry, "transition", change)
        assert self.start(run, {"submitted"})
        self.update_run(run, pid=supervisor.pid)
        return change(self, run, expect, to, reason)

    monkeypatch.setattr(Registry, "transition", begin_first)
    command = [sys.executable, "-c", "import time; time.sleep(60)", "rlx.launch.supervisor", run_id]
    supervisor = subprocess.Popen(command)
    try:
        assert main(["stop", run_id]) == 0
        assert supervisor.wait(LIMIT) == -signal.SIGTERM
    finally:
        stop_process(supervisor)
    assert registry.run(run_id).request == "stop"
    assert f"{run_id}: asked to stop" in capsys.readouterr().out


def test_a_process_id_of_another_container_is_not_signalled(registry, folder, capsys):
    sleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run_id = running(registry, folder, sleep.pid)
        registry.update_run(run_id, host=socket.gethostname())
        described = folder / "home" / "runs" / run_id / "supervisor.json"
        record_supervisor(described.parent, os.getpid())
        elsewhere = json.loads(described.read_text()) | {"namespace": "pid:[1]"}
        described.write_text(json.dumps(elsewhere))
        assert main(["stop", run_id]) == 0
        assert sleep.poll() is None
    finally:
        stop_process(sleep)
    assert registry.run(run_id).request == "stop"
    assert f"{run_id}: asked to stop" in capsys.readouterr().out


def test_following_ends_after_the_supervisor_was_killed(registry, folder, url, dead, capsys):
    run_id = running(registry, folder, dead)
    assert follow_run(run_id, url) == 1
    assert f"lost: its supervisor, process {dead}, was killed" in capsys.readouterr().err
    assert registry.run(run_id).status == "lost"


def test_the_summary_has_the_ends_of_phases_and_the_cpu_seconds_of_parts(
    registry, folder, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "160")
    phases = [{"name": "answers", "steps": 10}, {"name": "joint", "steps": 20}]
    run_id = running(registry, folder, os.getpid(), phases=phases)
    for step, label, right, confidence in (
        (0, "before", 1, 0.5),
        (5, "step", 0, 0.5),
        (10, "step", 2, 0.5),
        (30, "after", 3, 0.75),
    ):
        correct = [float(n < right) for n in range(4)]
        figures = measure_calibration(correct, [confidence] * 4)
        registry.results.add_evaluation(run_id, step, label, "held_out", 4, figures, {})
        registry.results.add_evaluation(run_id, step, label, "held_out.far", 4, figures, {})
        registry.results.add_metrics(run_id, step, {"perf/cpu_evaluate_s": 1.5}, at=0.0)
    registry.results.add_metrics(run_id, 1, {"perf/cpu_sample_s": 2.25}, at=0.0)
    registry.transition(run_id, {"running"}, "finished")
    assert main(["status", run_id]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "before after answers after change",
        "accuracy 0.250 0.500 0.750 +0.500 higher is better",
        "Brier score 0.250 0.250 0.188 -0.062 lower is better",
        "Brier of a constant, the accuracy 0.188 0.250 0.188 +0.000 what Brier must beat",
        "far: accuracy 0.250 0.500 0.750 +0.500",
        "CPU-s sample 2.2, evaluate 6.0",
    ):
        assert line in lines, line


def test_the_summary_shows_strata_as_text(registry, folder, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    run_id = running(registry, folder, os.getpid())
    evil = "[/INST][bold]\x1b[31m\0\u202e"
    figures = {"n": 3, "accuracy": 0.5, "by_stratum": {evil: {"accuracy": 0.25, "auroc": 0.75}}}
    for label in ("before", "after"):
        registry.results.add_evaluation(run_id, 1, label, "held_out", 3, figures, {})
        registry.results.add_evaluation(run_id, 1, label, f"held_out.{evil}", 3, figures, {})
    registry.transition(run_id, {"running"}, "finished")
    assert main(["status", run_id]) == 0
    out = capsys.readouterr().out
    assert out.count("[/INST][bold]\\x1b[31m\\x00\\u202e") == 3
    assert not set(out) & set("\x1b\0\u202e")


@pytest.mark.parametrize(("learned", "idle"), [(2, 4), (2, 6), (0, 1)])
def test_status_says_that_steps_gave_no_gradient(registry, folder, capsys, learned, idle):
    run_id = running(registry, folder, os.getpid())
    for step in range(1, learned + idle + 1):
        share = 1.0 if step > learned else 0.5
        figures = {"rollout/zero_signal_answer": share, "train/grad_norm": 0.0}
        registry.results.add_metrics(run_id, step, figures, at=0.0)
        registry.update_run(run_id, step=step)
    assert main(["status", run_id]) == 0
    last = f"the last {idle} of {learned + idle} steps"
    said = f"warning  no gradient in {last}: see `rlx samples {run_id}`"
    assert (said in capsys.readouterr().out) == (idle >= IDLE_STEPS or not learned)
    assert main(["status", run_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps_without_gradient"] == idle
