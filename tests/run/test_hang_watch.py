"""How long ranks have run without progress: pauses and clocks that jump do not count."""

import os
import time

import pytest

from rlx.launch.supervisor import HangWatch
from rlx.stopwatch import Stopwatch

LOOK = 5.0


class Watched:
    """A file of progress, the watch over it, and a clock that is set by hand."""

    def __init__(self, folder):
        self.now, self.progress = 1000.0, folder / "progress.json"
        self.progress.touch()
        self.watch = HangWatch(self.progress, Stopwatch(LOOK, lambda: self.now))

    def look(self, seconds=LOOK):
        self.now += seconds
        return self.watch.measure_silence()


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


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
