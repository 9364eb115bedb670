"""What plugins start ends with them: at a deadline, a crash, and the end of a pool or a rank."""

import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from leaving_rewards import (
    ENDS,
    STARTS,
    importing,
    keep_workers_slowly,
    leaving,
    orphaning,
    waiting,
)
from patience import LIMIT, wait_until

from rlx.plugin import Sample
from rlx.reward import JobOutcome, RewardJob, RewardPool

DEADLINE = 0.5
FAULTS = {
    "its deadline": "deadline of 0.5 s passed",
    "its exit": "process died (exit code 3)",
    "a crash": "process died (signal 11)",
}
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def pool():
    """Two workers, both of which are there: what one of them started must be known as its own."""
    with RewardPool(workers=2, memory_mb=256) as pool:
        pool.score([job(leaving(how="plainly"), "0", deadline=60) for _ in range(4)])
        yield pool


@pytest.fixture
def mark():
    """How long the processes of one test sleep, by which they are known."""
    mark = f"{100_000 + os.getpid()}.{next(numbers):04d}"
    yield mark
    for process in marked(mark):
        process.kill()


def marked(mark):
    """Live processes with this argument."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if mark in (process.info["cmdline"] or ()) and process.info["status"] != "zombie"
    ]


def job(reward, response, deadline=DEADLINE):
    sample = Sample(id="a", problem={}, turn="answer", number=1, response=response)
    return RewardJob(reward, (sample,), deadline)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("how", STARTS)
def test_what_a_scorer_started_ends_with_it(pool, mark, how, end):
    deadline = DEADLINE if end == "its deadline" else 60  # on a crowded machine others take longer
    (outcome,) = pool.score([job(leaving(how=how, end=end), mark, deadline)])
    assert outcome == JobOutcome(fault=FAULTS[end])
    assert marked(mark) == []


def test_orphans_that_have_ended_are_collected(pool):
    (outcome,) = pool.score([job(orphaning(), "", deadline=60)])
    assert outcome.fault is None
    assert not psutil.Process(int(outcome.verdicts[0].value)).children()


@pytest.mark.parametrize("how", STARTS)
def test_what_a_scorer_left_running_ends_with_the_pool(mark, how):
    with RewardPool(workers=1, memory_mb=256) as pool:
        (outcome,) = pool.score([job(leaving(how=how), mark, deadline=60)])
        assert outcome.fault is None
        wait_until("the processes, which a scorer may keep for its next call", lambda: marked(mark))
    assert marked(mark) == []


INTERRUPTED = """
import os, signal, subprocess, sys
from multiprocessing import connection
from rlx import descendants
from rlx.reward import plugin_process
from rlx.reward.plugin_process import JobProcess, start_worker

mark, lines = sys.argv[1], 0
files = {module.__file__ for module in (connection, descendants, plugin_process)}

def interrupt_before(number):
    def trace(frame, event, argument):
        global lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        if event == "line" and lines == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return trace
    return trace

def end_worker(number):
    start_worker()
    subprocess.Popen(["sleep", mark])
    jobs = JobProcess()
    jobs._start()
    sys.settrace(interrupt_before(number))
    jobs.end()
    sys.settrace(None)
    os._exit(0)

number, code = 0, None
while code != 0:
    number += 1
    if not (pid := os.fork()):
        end_worker(number)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = subprocess.run(["pgrep", "--full", f"sleep {mark}"], stdout=subprocess.PIPE).stdout
    assert not left, f"interrupted before line {number}"
print(number)
"""


def test_a_signal_in_the_midst_of_an_end_leaves_nothing(mark):
    """A worker whose pool closes while it ends its plugins' processes is told to end again."""
    command = [sys.executable, "-c", INTERRUPTED, mark]
    tried = subprocess.run(command, check=True, timeout=LIMIT, stdout=subprocess.PIPE).stdout
    assert int(tried) > 15  # lines


POOL = """
import sys
sys.path.insert(0, sys.argv[1])
from leaving_rewards import leaving
from rlx.plugin import Sample
from rlx.reward import RewardJob, RewardPool
if __name__ == "__main__":
    sample = Sample(id="a", problem={}, turn="answer", number=1, response=sys.argv[2])
    with RewardPool(workers=1, memory_mb=256) as pool:
        pool.score([RewardJob(leaving(how="as an orphan", end=sys.argv[3]), (sample,), 3600.0)])
        print("scored", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["", "its deadline"], ids=["idle", "busy"])
def test_what_a_scorer_started_ends_with_a_killed_rank(mark, end):
    command = [sys.executable, "-c", POOL, str(Path(__file__).parent), mark, end]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        if not end:
            assert rank.stdout.readline() == b"scored\n"
        wait_until("the scorer's process", lambda: list_sleeping(mark))
        family = psutil.Process(rank.pid).children(recursive=True)
        rank.kill()
    wait_until("what the scorer started to end", lambda: not marked(mark))
    wait_until("the workers to end", lambda: not any(map(is_alive, family)))


def list_sleeping(mark):
    return [process for process in marked(mark) if process.name() == "sleep"]


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_what_is_left_of_a_killed_worker_is_a_dead_child(mark):
    with RewardPool(workers=1, memory_mb=256) as pool:
        pool.score([job(leaving(how="plainly"), mark, deadline=60)])
        wait_until("the scorer's process", lambda: list_sleeping(mark))
        child = list_sleeping(mark)[0].parent()
        child.parent().kill()
        wait_until("the worker's child to end with it", lambda: not is_alive(child))


@contextmanager
def paused(processes):
    """Goes on with every process whatever happens: one that stays paused is waited for."""
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def test_a_pause_is_not_counted_against_a_deadline(tmp_path):
    deadline, here = 3.0, tmp_path / "go on"
    others = set(psutil.Process().children(recursive=True))
    with RewardPool(workers=1, memory_mb=256) as pool, ThreadPoolExecutor() as threads:
        scored = threads.submit(pool.score, [job(waiting(), str(here), deadline)])
        wait_until("the scorer to wait", Path(f"{here}.waiting").exists)
        with paused(set(psutil.Process().children(recursive=True)) - others):
            time.sleep(deadline + 1)  # scenario
            here.touch()
        (outcome,) = scored.result()
    assert outcome.fault is None


def test_a_job_that_starts_before_its_worker_looks_has_its_deadline(mark, monkeypatch):
    """The time for the import of plugins must not be added to it."""
    monkeypatch.setattr("rlx.reward.workers.keep_workers", keep_workers_slowly)
    with RewardPool(workers=1, memory_mb=256) as pool:
        (outcome,) = pool.score([job(leaving(how="plainly", end="its deadline"), mark)])
    assert outcome.fault == FAULTS["its deadline"]


def test_what_a_reward_imports_when_it_is_called_is_not_counted_against_its_deadline(pool):
    outcomes = [pool.score([job(importing(), end)])[0] for end in ("", "its deadline")]
    assert [outcome.fault for outcome in outcomes] == [None, FAULTS["its deadline"]]
