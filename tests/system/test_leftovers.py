"""Temporary folders of ranks: what the dead have left is removed, and nobody else's."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlx.home import RunFolder
from rlx.launch.processes import open_temporary_folder

OPEN = """
import os, sys
from pathlib import Path
from rlx.home import RunFolder
from rlx.launch.processes import open_temporary_folder
with open_temporary_folder(RunFolder(Path(sys.argv[1]))) as variables:
    (Path(variables["TMPDIR"]) / "something").touch()
    print(variables["TMPDIR"], flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    return RunFolder(tmp_path / "run")


@pytest.fixture
def other(run):
    """Another process of the run on this machine, and its folder."""
    with subprocess.Popen(
        [sys.executable, "-c", OPEN, str(run.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_what_a_killed_process_left_is_removed_before_the_next_of_its_run(run, other, tmp_path):
    """Even if its parent has not collected it."""
    process, left = other
    weights = Path("/dev/shm", f"{left.name}-rlx-vllm-1", "model.safetensors")
    weights.parent.mkdir()
    weights.touch()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with open_temporary_folder(RunFolder(tmp_path / "another")):
        assert left.exists()
    with open_temporary_folder(run):
        assert not left.exists()
        assert not weights.parent.exists()


def test_the_folder_of_a_process_at_work_is_left_alone(run, other):
    process, theirs = other
    with open_temporary_folder(run) as variables:
        assert (theirs / "something").exists()
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait()
        assert Path(variables["TMPDIR"]).exists()
    assert not any(theirs.parent.iterdir())
