"""Waiting for a registry that is away for a while: a server that is restarted must end no run."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from rlx_registry import DatabaseUnavailableError, DatabaseUnwritableError

__all__ = ["PATIENCE", "retry_registry_call"]

PATIENCE = 600.0
"""Seconds that a write waits for the registry to come back."""
LONGEST = 10.0
"""Seconds between two tries, at most."""

T = TypeVar("T")


def retry_registry_call(ask: Callable[[], T], patience: float = PATIENCE) -> T:
    """Asks the registry, again and again while it cannot be reached.

    A disk that is full, or may only be read, does not come back by waiting.

    Raises:
        Unavailable: it has been away for `patience` seconds.
    """
    until, pause = time.monotonic() + patience, 0.25
    while True:
        try:
            return ask()
        except DatabaseUnwritableError:
            raise
        except DatabaseUnavailableError as error:
            if time.monotonic() > until:
                raise
            if pause == 0.25:
                with suppress(OSError):  # the log's disk may be full
                    print(f"waiting for the registry: {error}", flush=True)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
