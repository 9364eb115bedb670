"""A copy of the helper is what a new interpreter would be, to itself and to others."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from forked import MAIN, cold_starts, fork_rlx
from patience import LIMIT, stop_process, wait_until

WAITING = ["score", "--reward=countdown", "--json", "-"]
"""Reads its standard input to the end."""


@pytest.fixture(autouse=True)
def forks():
    """Also without `--forks`."""
    with cold_starts():
        fork_rlx()
        yield


def begin(folder, *arguments, cold=False, **options):
    environment = {**os.environ, "RLX_HOME": str(folder / "home"), "ADDED": "é = \u3042"}
    with cold_starts() if cold else nullcontext():
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )


def look(process):
    """What others see of a process that waits for its input."""
    seen, waits_for = psutil.Process(process.pid), Path(f"/proc/{process.pid}/wchan")
    wait_until("it to read its input", lambda: "pipe_read" in waits_for.read_text())
    return {
        "command": [word for word in seen.cmdline() if word],
        "environment": {**seen.environ()},
        "folder": seen.cwd(),
        "parent": seen.ppid(),
        "leads": os.getpgid(process.pid) == process.pid,
        "session": os.getsid(process.pid) == process.pid,
        "files": {Path(f"/proc/{process.pid}/fd/{n}").readlink().parts[0][:5] for n in range(3)},
    }


@pytest.mark.parametrize("new_session", [True, False])
def test_others_see_the_same_process(tmp_path, new_session):
    pair = [
        begin(tmp_path, *WAITING, cold=cold, start_new_session=new_session)
        for cold in (False, True)
    ]
    try:
        copy, cold = map(look, pair)
        assert copy == cold
        assert copy["parent"] == os.getpid()
        maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in pair]
        assert ["libtorch" in mapped for mapped in maps] == [True, False]
    finally:
        for process in pair:
            stop_process(process)


@pytest.mark.parametrize("arguments", [["--version"], ["runs"], ["nothing"], ["status", "r-0009"]])
def test_it_prints_the_same_and_ends_alike(tmp_path, arguments):
    pair = [begin(tmp_path, *arguments, cold=cold) for cold in (False, True)]
    copy, cold = [(*process.communicate(timeout=LIMIT), process.returncode) for process in pair]
    assert copy == cold


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_it_as_they_end_others(tmp_path, number):
    pair = [begin(tmp_path, *WAITING, cold=cold) for cold in (False, True)]
    for process in pair:
        look(process)
        process.send_signal(number)
    for process in pair:
        process.communicate(timeout=LIMIT)
    assert pair[0].returncode == pair[1].returncode != 0
