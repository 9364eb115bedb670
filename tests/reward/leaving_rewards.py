"""Plugins that start processes. A module of its own, so that worker processes can import it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlx.plugin import reward
from rlx.reward import workers
from rlx.reward.plugin_process import _STARTED, JobProcess

IGNORING = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"
)
STARTS = {
    "plainly": lambda mark: subprocess.Popen(["sleep", mark]),
    "by a shell": lambda mark: subprocess.Popen(f"sleep {mark} & sleep {mark}; true", shell=True),
    "in a session of its own": lambda mark: subprocess.Popen(
        ["sleep", mark], start_new_session=True, env={}
    ),
    "as an orphan": lambda mark: subprocess.run(f"setsid sleep {mark} &", shell=True, check=True),
    "deaf to SIGTERM": lambda mark: subprocess.Popen(
        [sys.executable, "-c", f"{IGNORING}; time.sleep(float(sys.argv[1]))", mark],
        stdout=subprocess.PIPE,
    ).stdout.readline(),
    "by a fork": lambda mark: os.fork() or os.execlp("sleep", "sleep", mark),
}
ENDS = {
    "its deadline": lambda: time.sleep(3600),  # scenario
    "its exit": lambda: os._exit(3),
    "a crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}


@reward
def orphaning(sample):
    """Leaves an orphan that has ended; returns the id of the process that adopts it."""
    reading, writing = os.pipe()
    if not (parent := os.fork()):
        if not os.fork():
            os.close(writing)
            os.read(reading, 1)  # until its parent has ended
        os._exit(0)
    os.waitpid(parent, 0)
    os.close(writing)
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    os.close(reading)
    return os.getpid()


@reward
def leaving(sample, *, how: str, end: str = ""):
    """Starts processes that sleep for as many seconds as the response says, then ends so."""
    STARTS[how](sample.response)
    return ENDS[end]() if end else 1.0


@reward
def importing(sample):
    """Imports what takes twice the deadline, and then ends as the response says."""
    import slow_to_import  # noqa: F401

    return ENDS[sample.response]() if sample.response else 1.0


@reward
def waiting(sample):
    """1, once the file that the response names exists, which it says it waits for by another."""
    Path(f"{sample.response}.waiting").touch()
    while not Path(sample.response).exists():
        time.sleep(0.01)  # scenario
    return 1.0


def keep_workers_slowly(*given):
    """`keep_workers` of a keeper that does not get to run until its child runs a job."""
    begin = JobProcess.begin

    def begin_slowly(self, chunk, deadlines, *, is_concurrent):
        begin(self, chunk, deadlines, is_concurrent=is_concurrent)
        while deadlines and self._counters[_STARTED] == self._before:
            time.sleep(0.01)  # scenario

    JobProcess.begin = begin_slowly
    workers.keep_workers(*given)
