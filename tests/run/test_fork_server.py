"""Ranks are forks of a process that has imported their libraries, and that outlives them."""

import os
import signal
from pathlib import Path

import psutil
from forked import cold_starts


def seconds(pid):
    """CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def test_an_attempt_after_the_first_imports_nothing(own_home):
    sets = {**own_home.long, "runner.ranks": 2, "runner.max_attempts": 3}
    with cold_starts():
        run = own_home.rlx("submit", own_home.yaml, "-qd", sets=sets).stdout.strip()

    def has_trained(attempt, beyond):
        record = own_home.run(run)
        assert record.status in ("submitted", "running"), record.reason
        return record.attempt == attempt and record.step > beyond

    def await_attempt(attempt):
        step = own_home.run(run).step
        own_home.until(lambda: has_trained(attempt, step), f"attempt {attempt} to train")
        ranks = own_home.ranks(run)
        assert len(ranks) == 2
        return own_home.fork_server(run), ranks

    server, first = await_attempt(1)
    assert {psutil.Process(rank).ppid() for rank in first} == {own_home.run(run).pid}
    assert {os.getsid(rank) for rank in first} == set(first)
    assert "libtorch" in Path(f"/proc/{server}/maps").read_text()
    assert psutil.Process(server).num_threads() == 1
    os.kill(first[1], signal.SIGKILL)

    same, second = await_attempt(2)
    assert same == server
    assert not {*first} & {*second}
    assert max(map(seconds, second)) < seconds(server)

    os.kill(server, signal.SIGKILL)  # nobody needs it now
    step = own_home.run(run).step
    own_home.until(lambda: own_home.run(run).step > step, "the ranks to train without it")
    os.kill(second[0], signal.SIGKILL)
    other, _ = await_attempt(3)
    assert other != server

    own_home.stop(run)
    own_home.until(lambda: not own_home.processes(), "every process to end")
