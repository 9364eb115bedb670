"""What is asked again of a registry that cannot be reached, and for how long."""

import errno
from pathlib import Path

import pytest

from rlx.record import retry_registry_call
from rlx.stopwatch import Clock
from rlx_registry import DatabaseUnavailableError, DatabaseUnwritableError

AWAY = DatabaseUnavailableError("it is away")


class Outage:
    """A registry that answers after some time, and the clock that tells it."""

    def __init__(self, seconds, error=AWAY):
        self.seconds, self.error, self.now, self.pauses = seconds, error, 0.0, []
        self.clock = Clock(lambda: self.now, self.pause)

    def pause(self, seconds):
        self.now += seconds
        self.pauses.append(seconds)

    def ask(self):
        if self.now < self.seconds:
            raise self.error
        return "here"


def test_it_is_asked_again_ever_more_rarely(capsys):
    outage = Outage(seconds=31)
    assert retry_registry_call(outage.ask, clock=outage.clock) == "here"
    assert outage.pauses == [0.25, 0.5, 1, 2, 4, 8, 10, 10]
    assert capsys.readouterr().out == "waiting for the registry: it is away\n"


def test_patience_ends():
    outage = Outage(seconds=1000)
    with pytest.raises(DatabaseUnavailableError, match="it is away"):
        retry_registry_call(outage.ask, 20, outage.clock)
    assert outage.now == 25.75  # the last pause began before its end


def test_a_full_disk_is_not_waited_for():
    outage = Outage(1, DatabaseUnwritableError(Path("r.db"), errno.ENOSPC, "full"))
    with pytest.raises(DatabaseUnwritableError):
        retry_registry_call(outage.ask, clock=outage.clock)
    assert outage.pauses == []
