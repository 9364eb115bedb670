"""Full disks, read-only homes, interrupts: real ones. One clear answer each, and true records.

Small file systems are mounted in a namespace of their own, which ends with the test.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import LIMIT, find_processes, signal_processes

from rlx.launch.failures import RESERVE_BYTES
from rlx_registry import read_body

UP = "import sys; from rlx.cli import main; print('up', flush=True); sys.exit(main())"
ENDED = {"finished", "failed", "stopped", "lost"}


class Mount:
    """A file system in memory, and `rlx` with its home on it."""

    def __init__(self, home, point, size):
        point.mkdir()
        script = f"mount -t tmpfs -o size={size} tmpfs '{point}' && echo ready && exec sleep 3600"
        self.holder = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        if self.holder.stdout.readline() != b"ready\n":
            said = self.holder.communicate()[1].decode().strip()
            pytest.skip(f"this machine lets nobody mount a file system: {said}")
        self.point = point
        self.seen = Path(f"/proc/{self.holder.pid}/root{point}")
        """The same folder from outside."""
        self.home = home
        (self.seen / "home").mkdir()
        self.environment = {**home.environment, "RLX_HOME": str(point / "home")}

    def begin(self, *command):
        inside = ["nsenter", f"--target={self.holder.pid}", "--user", "--mount"]
        return subprocess.Popen(
            [*inside, "--preserve-credentials", "--", *map(str, command)],
            cwd=self.home.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def rlx(self, *arguments, sets=()):
        overrides = [f"--set={path}={value}" for path, value in dict(sets).items()]
        return self.begin(sys.executable, "-c", UP, *arguments, *overrides)

    def python(self, code):
        """What a program prints that has `registry` open; SQLite must be inside to see its file."""
        opened = f"sqlite:///{self.point}/home/registry.db"
        begin = f"from rlx_registry import *; registry = Registry.open({opened!r})\n"
        code, out, err = said(self.begin(sys.executable, "-c", begin + code))
        assert (code, err) == (0, "")
        return out

    def fill(self):
        """Leaves no space at all."""
        filler = self.begin("dd", "if=/dev/zero", f"of={self.point}/filler", "bs=4k")
        assert "No space left on device" in filler.communicate()[1]

    def make_read_only(self):
        assert said(self.begin("mount", "-o", "remount,ro", self.point)) == (0, "", "")


@pytest.fixture
def mount(home, tmp_path):
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("mounting a file system takes unshare and nsenter")
    mounts = []

    def make(size):
        mounts.append(Mount(home, tmp_path / f"mount{len(mounts)}", size))
        return mounts[-1]

    yield make
    for made in mounts:
        # Of a test that failed half-way.
        signal_processes(find_processes(made.environment["RLX_HOME"]), signal.SIGKILL)
        made.holder.kill()
        made.holder.communicate()


def said(process):
    """Exit code, stdout and stderr; nobody is shown a traceback."""
    out, err = process.communicate(timeout=LIMIT)
    assert "Traceback" not in err
    return process.returncode, out.removeprefix("up\n"), err


BODIES = """
import json
steps = registry.results.rollout_steps("r-0001")
bodies = {s: registry.results.rollout_body("r-0001", s) for s in steps}
print(json.dumps({step: (body.path, body.sha256) for step, body in bodies.items()}))
"""


def test_a_disk_that_fills_up_ends_the_run_with_the_reason(home, mount):
    disk = mount("32m")
    sets = {**home.mirrored, "phases.0.steps": 100_000}
    following = disk.rlx("submit", home.yaml, sets=sets)
    root = disk.seen / "home" / "runs" / "r-0001"
    home.until((root / "rollouts" / "step_000002.parquet").exists, "the run to train")
    home.until((disk.seen / "home" / "mlartifacts").exists, "the mirror to begin")
    assert (root / "reserve").stat().st_size == RESERVE_BYTES
    disk.fill()

    code, _, err = said(following)
    assert code == 4
    assert "home has 3" in err, "32 MB is little"
    assert "✗ r-0001 failed: disk full: " in err
    assert "free some space, or set RLX_HOME" in err
    home.until(lambda: not find_processes(disk.environment["RLX_HOME"]), "every process to end")

    # The disk is still full, but for the rest of the reserve.
    code, out, _ = said(disk.rlx("status", "latest", "--json"))
    status = json.loads(out)
    assert (code, status["status"], status["exit_code"]) == (0, "failed", 4)
    assert status["reason"].startswith("disk full: ")
    assert not (root / "reserve").exists()
    told = json.loads(disk.python(BODIES))
    assert list(told) == [str(step) for step in range(1, status["step"] + 1)]
    for path, sha256 in told.values():
        assert read_body(root / path, sha256).num_rows
    assert len(list((root / "rollouts").iterdir())) <= len(told) + 1
    for file in root.rglob("*.json"):
        json.loads(file.read_text())


def test_a_full_disk_is_said_before_anything_is_recorded(home, mount):
    disk = mount("1m")
    code, out, err = said(disk.rlx("submit", home.yaml))
    assert (code, out) == (4, "")
    assert err == f"error: disk full: {disk.point}/home has 1 MB left; " + (
        "free some space, or set RLX_HOME to a folder on another disk\n"
    )
    assert list((disk.seen / "home").iterdir()) == []


FAILED_RUN = f"""
import sys
from pathlib import Path
sys.path.append({str(Path(__file__).parents[1])!r})
from submissions import index_row, submit
run = submit(registry)
root = Path(registry.url.removeprefix("sqlite:///")).parent / "runs" / run.id
root.mkdir(parents=True)
registry.update_run(run.id, directory=root)
place = {{"path": "x", "sha256": "x", "bytes": 1, "statistics": {{}}}}
registry.results.add_rollouts(run.id, 1, **place, index=[index_row()])
registry.transition(run.id, ["submitted"], "failed", "long ago")
"""


def test_a_read_only_home_can_be_read_and_refuses_the_rest(home, mount):
    disk = mount("8m")
    disk.python(FAILED_RUN + "registry.close()")
    disk.make_read_only()
    for arguments in (["runs"], ["status", "latest"], ["samples", "--json"], ["logs", "--json"]):
        code, out, err = said(disk.rlx(*arguments))
        assert (code, err) == (0, ""), arguments
        assert out
    for arguments in (["submit", home.yaml], ["stop", "latest"]):
        code, out, err = said(disk.rlx(*arguments))
        assert (code, out) == (4, "")
        assert "is on a read-only file system: set RLX_HOME to a writable folder" in err
        assert err.count("\n") == 1


def started(own, sets):
    """`rlx submit`, as soon as its interpreter runs."""
    process = own.begin("submit", own.yaml, sets=sets, program=UP)
    assert process.stdout.readline() == "up\n"
    return process


def runs_of(own):
    if not (own.path / "registry.db").exists():
        return []
    done = own.rlx("runs", "--json")
    return json.loads(done.stdout) if done.returncode == 0 else []


def test_an_interrupt_at_any_moment_leaves_no_run_without_its_supervisor(own):
    long = {**own.small, "phases.0.steps": 100_000}
    for seed, delay in enumerate((0.05, 0.2, 0.5, 1.0, 2.0, 4.0)):
        process = started(own, {**long, "seed": seed})
        time.sleep(delay)  # scenario
        os.killpg(process.pid, signal.SIGINT)
        code, _, err = said(process)
        assert code == 130, err
        assert "interrupted" in err or "detached" in err
        waiting = [run for run in runs_of(own) if run["status"] not in ENDED]
        assert len(waiting) == ("detached" in err)
        for run in waiting:
            assert f"{run['run']} keeps running" in err
            supervisor = own.run(run["run"]).pid
            assert supervisor in own.running()
            assert own.rlx("stop", run["run"]).returncode == 0
            own.until(lambda s=supervisor: s not in own.running(), "the supervisor to leave")
    assert {run["status"] for run in runs_of(own)} <= {"stopped"}
    own.until(lambda: not own.processes(), "every process to end")


def test_one_run_of_two_submissions_that_outlives_its_terminal(own):
    long = {**own.small, "phases.0.steps": 100_000}
    pair = [started(own, long) for _ in range(2)]
    own.until(lambda: any(p.poll() is not None for p in pair), "one to find the other")
    (idle,) = [p for p in pair if p.poll() is not None]
    (busy,) = [p for p in pair if p is not idle]
    code, out, _ = said(idle)
    assert (code, out.split(":")[0]) == (0, "= nothing to do")
    assert len(runs_of(own)) == 1

    assert busy.stdout.readline().startswith("✓")
    busy.send_signal(signal.SIGTERM)
    assert said(busy)[0] == -signal.SIGTERM
    own.until(lambda: own.run("latest").status == "running", "the run to go on")
    third = own.rlx("submit", own.yaml, sets=long)
    assert third.returncode == 0
    assert "is running as r-0001" in third.stdout
    assert own.rlx("stop", "latest").returncode == 0
    own.until(lambda: own.run("latest").status == "stopped", "the run to stop")
    own.until(lambda: not own.processes(), "every process to end")
