"""How long ranks have run without progress: pauses and clocks that jump do not count."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from patience import wait_until

from rlx.launch.supervisor import HangWatch
from rlx.stopwatch import Stopwatch

LOOK = 5.0


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Watched:
    """A process that calls itself a rank, and the watch over it."""

    def __init__(self, rank, folder):
        self.rank, self.progress, self.clock = rank, folder / "progress.json", Clock()
        self.progress.touch()
        self.watch = HangWatch(self.progress, str(folder), Stopwatch(LOOK, self.clock))

    def look(self, seconds=LOOK):
        self.clock.now += seconds
        return self.watch.measure_silence([self.rank.pid])

    def send(self, number, state):
        """Sends a signal to the rank and waits for it to be in a state of `/proc`."""
        self.rank.send_signal(number)
        await_state(self.rank.pid, state)


def await_state(pid, states):
    stat = Path(f"/proc/{pid}/stat")
    wait_until(
        f"{pid} to be in {states}", lambda: stat.read_text().rpartition(")")[2].split()[0] in states
    )


@pytest.fixture
def watched(tmp_path):
    code = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, "rlx.launch.rank", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline()
        yield Watched(rank, tmp_path)
        rank.kill()


def test_time_without_progress_adds_up_until_there_is_some(watched):
    assert [watched.look() for _ in range(3)] == [5, 10, 15]
    watched.progress.with_suffix(".tmp").touch()
    watched.progress.with_suffix(".tmp").replace(watched.progress)
    assert [watched.look() for _ in range(2)] == [0, 5]


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_pause_of_the_watch_and_a_clock_that_jumps_count_as_one_look(watched, jump):
    assert watched.look(jump) <= LOOK
    assert watched.look() <= 2 * LOOK


@pytest.mark.parametrize("age", [86_400.0, -86_400.0])
def test_times_of_files_are_not_compared_with_the_clock(watched, age):
    stamp = time.time() - age
    os.utime(watched.progress, (stamp, stamp))
    assert [watched.look() for _ in range(2)] == [0, 5]


def test_ranks_that_are_stopped_do_not_hang(watched):
    assert watched.look() == 5
    watched.send(signal.SIGSTOP, "T")
    assert [watched.look() for _ in range(10)] == [5] * 10
    assert watched.watch.paused
    watched.send(signal.SIGCONT, "RS")
    assert [watched.look() for _ in range(2)] == [10, 15]
    assert not watched.watch.paused


def test_a_rank_below_its_launcher_is_seen(watched):
    watched.send(signal.SIGSTOP, "T")
    assert watched.watch.measure_silence([os.getpid()]) == 0
    assert watched.watch.paused


def test_a_stopped_process_that_is_no_rank_pauses_nothing(watched):
    with subprocess.Popen(["sleep", "1000"]) as other:
        other.send_signal(signal.SIGSTOP)
        await_state(other.pid, "T")
        watched.clock.now += LOOK
        assert watched.watch.measure_silence([os.getpid()]) == 5
        other.kill()


@pytest.mark.parametrize(
    ("top", "file", "frozen", "thawed", "shown"),
    [
        ("freezer", "freezer.state", "FROZEN", "THAWED", "freezer.state"),
        ("unified", "cgroup.freeze", "1", "0", "cgroup.events"),
        ("", "cgroup.freeze", "1", "0", "cgroup.events"),
    ],
    ids=["version 1", "version 2 beside it", "version 2"],
)
def test_ranks_in_a_frozen_control_group_do_not_hang(watched, top, file, frozen, thawed, shown):
    top = Path("/sys/fs/cgroup") / top
    group = top / f"rlx-test-{os.getpid()}"
    if not (top / "cgroup.procs").exists() or not os.access(top / "cgroup.procs", os.W_OK):
        pytest.skip("no control groups of this kind can be made here")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control groups can be made here: {error.strerror}")
    try:
        (group / "cgroup.procs").write_text(str(watched.rank.pid))
        (group / file).write_text(frozen)
        wait_until(
            "the group to freeze",
            lambda: {"FROZEN", "frozen 1"} & set((group / shown).read_text().splitlines()),
        )
        assert [watched.look() for _ in range(2)] == [0, 0]
        assert watched.watch.paused
        (group / file).write_text(thawed)
        assert watched.look() == 5
    finally:
        with suppress(OSError):
            (group / file).write_text(thawed)
        watched.rank.kill()
        watched.rank.wait()
        group.rmdir()
