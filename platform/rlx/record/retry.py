"""Retry registry calls while the database is unavailable, so that a restart does not end a run."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from rlx.stopwatch import CLOCK, Clock
from rlx.text import escape_unprintable
from rlx_registry import DatabaseUnavailableError, DatabaseUnwritableError

OUTAGE_TIME_LIMIT = 600.0
"""Seconds to wait for the registry to become available again."""
LONGEST_PAUSE = 10.0
"""Maximum seconds between two attempts."""

T = TypeVar("T")


def retry_registry_call(
    ask: Callable[[], T], patience: float = OUTAGE_TIME_LIMIT, clock: Clock = CLOCK
) -> T:
    """Calls `ask`, with retries while the registry is unavailable.

    A full or read-only disk is not retried, because waiting does not fix it.

    Raises:
        DatabaseUnavailableError: the registry was unavailable for `patience` seconds.
        DatabaseUnwritableError: the disk is full or read-only.
    """
    until, pause = clock.now() + patience, 0.25
    while True:
        try:
            return ask()
        except DatabaseUnwritableError:
            raise
        except DatabaseUnavailableError as error:
            if clock.now() > until:
                raise
            if pause == 0.25:
                with suppress(OSError):  # the log's disk may be full
                    print(escape_unprintable(f"waiting for the registry: {error}"), flush=True)
        clock.pause(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
