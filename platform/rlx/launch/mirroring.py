"""Mirrors the registry's records to MLflow: while a run is supervised, and after it has ended."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from rlx.home import get_rlx_home, tracking_url
from rlx.record import MirrorUnavailableError, MlflowMirror, retry_registry_call
from rlx.reporting import Report, log_report
from rlx.text import escape_unprintable
from rlx_registry import ENDED, DatabaseUnavailableError, Registry, RunRecord

__all__ = ["MirrorThread", "get_mlflow_uri", "update_mlflow_mirror"]

EVERY = 10.0
"""Seconds between two deliveries."""
UNTIL_STEP = 60
"""Seconds in which the ranks may take a step before MLflow is imported, which would delay them."""
FINAL_TRIES = 3
FINAL_SECONDS = 120.0
"""Seconds after the end of a run in which its remaining records must be delivered."""


class MirrorThread:
    """Delivers a run's records until it has ended and MLflow has them all, or stays unreachable.

    A daemon thread, so a server that hangs does not keep the supervisor. Ending it at any moment is
    safe, like a kill: the cursor in the registry follows what MLflow has confirmed.

    Args:
        url: of the registry, without a fencing token: the mirror delivers whatever is recorded.
        run_id: id of the run.
        uri: MLflow's tracking URI from the experiment; None if there is no mirror.
        has_room: false once the disk has been full; MLflow's store may be on the same disk.
    """

    def __init__(
        self, url: str, run_id: str, uri: str | None, has_room: Callable[[], bool]
    ) -> None:
        self._url, self._run_id, self._has_room = url, run_id, has_room
        self._uri = None if uri is None else tracking_url(uri)
        self._ended = threading.Event()
        self._left = False
        self._behind: str | None = None
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def end(self) -> str | None:
        """Delivers the remaining records; returns why MLflow is incomplete, or None.

        Takes at most `FINAL_SECONDS`.
        """
        self._ended.set()
        self._thread.join(FINAL_SECONDS)
        if self._thread.is_alive():
            self._left = True
            self._behind = _describe_missing(f"did not answer in {FINAL_SECONDS:.0f} s")
            print_to_log(f"mirror: {self._behind}")
        return self._behind

    def leave(self) -> None:
        """Stops delivering: another supervisor has taken over."""
        self._left = True
        self._ended.set()
        self._thread.join(FINAL_SECONDS)

    def _run(self) -> None:
        if self._uri is None:
            return
        try:
            with retry_registry_call(lambda: Registry.open(self._url)) as registry:
                place = get_rlx_home() / "mlartifacts"
                mirror = MlflowMirror(registry, self._run_id, self._uri, place)
                self._await_step(registry)
                self._deliver(mirror)
                if not self._left:
                    self._finish(mirror)
        except Exception as error:  # noqa: BLE001  (reported: a mirror must not end a run)
            self._behind = f"MLflow updates stopped: {type(error).__name__}: {error}"
            print_to_log(f"mirror: {self._behind}")

    def _await_step(self, registry: Registry) -> None:
        """Waits until the ranks train, or the run has ended, but at most `UNTIL_STEP`."""

        def read_step() -> int:
            return retry_registry_call(lambda: registry.run(self._run_id)).step

        first = read_step()
        for _ in range(UNTIL_STEP):
            if self._ended.wait(1.0) or read_step() != first:
                return

    def _deliver(self, mirror: MlflowMirror) -> None:
        """Delivers new records until the run has ended."""
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
        """Delivers the remaining records."""
        for attempt in range(FINAL_TRIES if self._has_room() else 0):
            if self._left:
                return
            try:
                mirror.catch_up()
                return
            except (MirrorUnavailableError, DatabaseUnavailableError) as error:
                print_to_log(f"mirror: {error}")
                time.sleep(2**attempt)
        why = "could not be reached" if self._has_room() else "is out of date: the disk is full"
        self._behind = _describe_missing(why)


def _describe_missing(why: str) -> str:
    return f"MLflow {why}; the registry is complete, and `rlx check --repair` updates MLflow later"


def print_to_log(line: str, *, out: TextIO | None = None) -> None:
    """Prints a line to the run's log.

    Args:
        out: the log, where stdout is something else.
    """
    with suppress(OSError):  # the log's disk may be full
        print(line, file=out, flush=True)


def get_mlflow_uri(run: RunRecord) -> str | None:
    """Returns the URI of MLflow in the run's spec."""
    uri: str | None = run.spec.get("tracking", {}).get("mlflow")
    return uri


def update_mlflow_mirror(registry: Registry, run: RunRecord, report: Report = log_report) -> None:
    """Sends what was added to an ended run to MLflow, if the run is mirrored.

    A run that has not ended sends it with its own records. If MLflow is unreachable, a warning is
    reported; the registry keeps the records.
    """
    uri = get_mlflow_uri(run)
    if uri is None or run.status not in ENDED:
        return
    try:
        artifacts = get_rlx_home() / "mlartifacts"
        mirror = MlflowMirror(registry, run.id, tracking_url(uri), artifacts, FINAL_SECONDS)
        mirror.finish(run.status)
    except MirrorUnavailableError as error:
        why = escape_unprintable(str(error))
        report(f"warning: MLflow was not updated: {why}; the registry has it", err=True)
