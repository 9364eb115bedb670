"""The thread of a supervisor that tells MLflow what the registry has."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rlx.home import get_rlx_home, tracking_url
from rlx.record import MirrorUnavailableError, MlflowMirror, retry_registry_call
from rlx_registry import DatabaseUnavailableError, Registry

__all__ = ["MirrorThread"]

EVERY = 10.0
"""Seconds between two deliveries."""
FINAL_TRIES = 3


class MirrorThread:
    """Delivers until the run has ended and all is there, or MLflow stays away.

    Args:
        url: of the registry, without a fence: MLflow is told of whatever stands there.
        run_id: the run.
        uri: MLflow's, as the experiment has it; None where there is no mirror.
        has_room: whether nobody has met a full disk; MLflow's store may lie on the same one.
    """

    def __init__(
        self, url: str, run_id: str, uri: str | None, has_room: Callable[[], bool]
    ) -> None:
        self._url, self._run_id, self._has_room = url, run_id, has_room
        self._uri = None if uri is None else tracking_url(uri)
        self._ended = threading.Event()
        self._left = False
        self._behind: str | None = None
        self._thread = threading.Thread(target=self._run, name="mirror")
        self._thread.start()

    def end(self) -> str | None:
        """Delivers the rest; returns why MLflow does not have all, where it has not."""
        self._ended.set()
        self._thread.join()
        return self._behind

    def leave(self) -> None:
        """Tells no more: another supervisor does, from now on."""
        self._left = True
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        if self._uri is None:
            return
        try:
            with retry_registry_call(lambda: Registry.open(self._url)) as registry:
                place = get_rlx_home() / "mlartifacts"
                mirror = MlflowMirror(registry, self._run_id, self._uri, place)
                self._deliver(mirror)
                if not self._left:
                    self._finish(mirror)
        except Exception as error:  # noqa: BLE001  (told: a mirror must not end a run)
            self._behind = f"MLflow is not told more: {type(error).__name__}: {error}"
            print_to_log(f"mirror: {self._behind}")

    def _deliver(self, mirror: MlflowMirror) -> None:
        """Tells what there is, until the run has ended."""
        begun = False
        while not self._ended.wait(EVERY if begun else 0.1) and self._has_room():
            try:
                if not begun:
                    mirror.begin()
                    begun = True
                mirror.deliver()
            except (MirrorUnavailableError, DatabaseUnavailableError) as error:
                print_to_log(f"mirror: {error}")
                self._ended.wait(EVERY)
        self._ended.wait()

    def _finish(self, mirror: MlflowMirror) -> None:
        """Tells the rest."""
        for attempt in range(FINAL_TRIES if self._has_room() else 0):
            try:
                mirror.catch_up()
                return
            except (MirrorUnavailableError, DatabaseUnavailableError) as error:
                print_to_log(f"mirror: {error}")
                time.sleep(2**attempt)
        why = "could not be reached" if self._has_room() else "is not told more: the disk is full"
        self._behind = f"MLflow {why}; the registry holds everything, and `rlx sync` tells it later"


def print_to_log(line: str) -> None:
    """Prints into the run's log."""
    with suppress(OSError):  # the log's disk may be full
        print(line, flush=True)
