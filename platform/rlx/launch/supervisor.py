"""The supervisor of one run: `python -m rlx.launch.supervisor RUN_ID`, RLX_RUN_REGISTRY set.

It waits for devices, starts the ranks, keeps the run's heartbeat, feeds the MLflow mirror, and says
how the run ended. The durable record decides that, not an exit code: only a run whose first rank
recorded "completed" has finished. Ranks that were killed, or hang, are started again and go on from
the newest checkpoint.

Every attempt has a fencing token, its number. Once a later one has begun, whatever this supervisor
and its ranks still write is refused, and they leave.

A run on a full disk must still be able to say so: its folder holds a reserve, which whoever meets
the full disk first gives up. Once it is gone the mirror writes no more, for its store may lie on
the same disk.
"""

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlx.audit import draw_run_pictures
from rlx.errors import RlxError
from rlx.home import ATTEMPT, REGISTRY, RunFolder
from rlx.launch.attempt import Attempt, AttemptEnd, build_failed_end
from rlx.launch.device_slots import build_cuda_environment, build_device_request
from rlx.launch.failures import describe_error, is_disk_full
from rlx.launch.mirroring import MirrorThread, print_to_log
from rlx.launch.processes import this_machine
from rlx.launch.signals import SigtermListener
from rlx.launch.slurm import find_stop_status, list_startable_statuses, restore_disk_reserve
from rlx.launch.submission import fail_unless_started
from rlx.launch.takeover import attempts_used
from rlx.record import retry_registry_call
from rlx.spec import ExperimentSpec, LocalLauncherSpec, SlurmLauncherSpec
from rlx_registry import (
    ENDED,
    DatabaseUnavailableError,
    DatabaseUnwritableError,
    DeviceRequest,
    DevicesBusyError,
    FencedError,
    Registry,
    StartedAttempt,
    Status,
)

__all__ = ["main"]

LOOK = 1.0
"""Seconds between two looks at devices that others hold."""

T = TypeVar("T")


def main(run_id: str) -> int:
    """Supervises a run from its start, or its newest checkpoint, to its end."""
    orders = (
        SigtermListener()
    )  # before the run is ours: an early SIGTERM would leave it "running" for ever
    with retry_registry_call(lambda: Registry.open(os.environ[REGISTRY])) as registry:
        with fail_unless_started(registry, run_id):
            run = retry_registry_call(lambda: registry.run(run_id))
            folder = RunFolder(Path(run.directory or ""))
            spec = ExperimentSpec.model_validate_json(folder.resolved_spec.read_text())
            if (spec.digest, spec.seed) != (run.digest, run.seed):
                raise RlxError(f"{folder.root} belongs to another run, of another registry")
            expect = list_startable_statuses(spec.runner, run)
            if run.status in expect:
                restore_disk_reserve(folder)
                registry.update_run(run_id, pid=os.getpid(), host=this_machine())
            devices = build_device_request(spec)
            started = _wait_for_start(registry, run_id, expect, devices, orders)
        if started is None:
            if registry.run(run_id).status in ENDED:  # else somebody else has it
                folder.reserve.unlink(missing_ok=True)
            return 1
        supervisor = _Supervisor(registry, run_id, spec, folder, devices, orders)
        return supervisor.supervise(started)


def _wait_for_start(
    registry: Registry,
    run_id: str,
    expect: Collection[Status],
    devices: DeviceRequest | None,
    orders: SigtermListener,
) -> StartedAttempt | None:
    """Starts the run once its devices are free; None where somebody else has it, or stops it."""
    told = False
    while not orders.stop:
        why = retry_registry_call(lambda: _describe_earlier_run(registry, run_id, devices))
        try:
            if not why:
                started = retry_registry_call(
                    lambda: registry.start(run_id, expect, devices=devices)
                )
                if started is None:
                    print_to_log(f"{run_id} is not waiting to be started")
                return started
        except DevicesBusyError as busy:
            why = str(busy)
        if not told:
            told = True
            print_to_log(f"waiting: {why}")
            retry_registry_call(partial(registry.results.add_event, run_id, "waiting", why))
        if not retry_registry_call(lambda: registry.heartbeat(run_id)):
            return None
        orders.apply_request(retry_registry_call(lambda: registry.run(run_id)).request)
        time.sleep(LOOK)
    registry.transition(run_id, expect, "stopped", "stopped before it had begun")
    return None


def _describe_earlier_run(registry: Registry, run_id: str, devices: DeviceRequest | None) -> str:
    """Who has waited for longer on this machine; empty where nobody has.

    One that needs many devices would otherwise wait for ever behind those that need few.
    """
    if devices is None:
        return ""
    waiting = [r for r in registry.runs(status="submitted") if r.host == devices.host]
    first = min(waiting, key=lambda r: r.created, default=None)
    return "" if first is None or first.id == run_id else f"{first.id} has waited for longer"


class _Supervisor:
    def __init__(
        self,
        registry: Registry,
        run_id: str,
        spec: ExperimentSpec,
        folder: RunFolder,
        devices: DeviceRequest | None,
        orders: SigtermListener,
    ) -> None:
        self._registry = registry
        self._run_id = run_id
        self._spec = spec
        self._folder = folder
        self._devices = devices
        self._orders = orders

    def supervise(self, started: StartedAttempt) -> int:
        """Runs the ranks to their end and records it."""
        writer = retry_registry_call(
            lambda: self._registry.as_writer(self._run_id, started.attempt)
        )
        # Two may have waited, each of which has put its name there; this one has started.
        self._write(lambda: writer.update_run(self._run_id, pid=os.getpid(), host=this_machine()))
        mirror = MirrorThread(
            self._registry.url,
            self._run_id,
            self._spec.tracking.mlflow,
            lambda: self._folder.has_room,
        )
        try:
            end = self._run_attempts(writer, started)
        except BaseException as error:
            mirror.leave()
            if not isinstance(error, FencedError):
                raise
            print_to_log(f"leaving: {error}")
            return 1
        behind = mirror.end()
        if behind:
            self._record_event(self._registry, "mirror_behind", behind, level="warning")
        if retry_registry_call(lambda: self._registry.run(self._run_id)).status in ENDED:
            self._folder.reserve.unlink(missing_ok=True)  # else it has been resumed meanwhile
        return 0 if end.status == "finished" else 1

    def _run_attempts(self, writer: Registry, started: StartedAttempt) -> AttemptEnd:
        """Runs the ranks, again where that may help; records how the run has ended."""
        number = retry_registry_call(lambda: attempts_used(self._registry, self._run_id))
        while True:
            try:
                end = self._run_attempt(writer, started)
            except FencedError:
                raise
            except Exception as error:  # noqa: BLE001  (recorded: a run must not stay "running")
                end = build_failed_end(self._folder, error)
                _print_traceback()
            if not end.again or self._orders.stop or number >= self._spec.runner.max_attempts:
                break
            self._record_event(
                writer, "attempt_failed", f"attempt {number}: {end.reason}", level="warning"
            )
            print_to_log(f"attempt {number} failed: {end.reason}; starting again")
            again = self._restart_attempt(writer, end.reason)
            if again is None:
                break
            started, number = again, number + 1
            writer = retry_registry_call(
                partial(self._registry.as_writer, self._run_id, started.attempt)
            )
        on_slurm = isinstance(self._spec.runner.launcher, SlurmLauncherSpec)
        if end.status == "stopped" and on_slurm and not writer.run(self._run_id).request:
            end = AttemptEnd(*find_stop_status())
        self._record_end(writer, end)
        return end

    def _restart_attempt(self, writer: Registry, reason: str | None) -> StartedAttempt | None:
        devices = self._devices
        return self._write(lambda: writer.start(self._run_id, {"running"}, reason, devices=devices))

    def _run_attempt(self, writer: Registry, started: StartedAttempt) -> AttemptEnd:
        """Runs the ranks once, and draws the pictures where they have finished."""
        told = {
            REGISTRY: self._registry.url,
            ATTEMPT: str(started.attempt),
            **build_cuda_environment(started.devices),
        }
        attempt = Attempt(self._run_id, self._spec, self._folder, told, self._orders)
        if self._has_completed(writer):  # and a supervisor was lost that had only to say so
            end = AttemptEnd("finished")
        else:
            end = attempt.run(
                lambda: self._send_heartbeat(writer), lambda: self._has_completed(writer)
            )
        if end.status == "finished" and self._spec.tracking.pictures:
            try:
                draw_run_pictures(writer, self._run_id, self._folder)
            except FencedError:
                raise
            except Exception as error:  # noqa: BLE001  (recorded: the results stand without it)
                told_of = f"the pictures could not be drawn: {describe_error(error)}"
                self._record_event(writer, "report_failed", told_of, level="error")
                _print_traceback()
        return end

    def _send_heartbeat(self, writer: Registry) -> None:
        """Says that the run is alive, and looks for what others ask of it."""
        try:
            if not writer.heartbeat(self._run_id):
                self._orders.stop = True  # somebody else has ended the run
            self._orders.apply_request(writer.run(self._run_id).request)
        except DatabaseUnwritableError:
            raise
        except DatabaseUnavailableError as error:  # the ranks go on; they wait before they write
            print_to_log(f"no heartbeat: {error}")

    def _has_completed(self, writer: Registry) -> bool:
        events = retry_registry_call(lambda: writer.results.events(self._run_id))
        return any(event.kind == "completed" for event in events)

    def _record_end(self, writer: Registry, end: AttemptEnd) -> None:
        if isinstance(
            self._spec.runner.launcher, LocalLauncherSpec
        ):  # of other machines nobody adds it up
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._record_event(
                writer,
                "resources",
                "processor time and peak memory of the ranks and all that they started",
                {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024},
            )
        if end.status == "failed":
            told = {"exit_code": end.exit_code}
            self._record_event(writer, "failed", end.reason or "", told, level="error")
        self._write(lambda: writer.transition(self._run_id, {"running"}, end.status, end.reason))

    def _record_event(
        self,
        writer: Registry,
        kind: str,
        message: str,
        payload: dict[str, Any] | None = None,
        level: str = "info",
    ) -> None:
        self._write(
            lambda: writer.results.add_event(self._run_id, kind, message, payload, level=level)
        )

    def _write(self, write: Callable[[], T]) -> T:
        """Writes to the registry; gives up the reserve where the disk is full."""
        try:
            return retry_registry_call(write)
        except DatabaseUnwritableError as error:
            if not is_disk_full(error):
                raise
            self._folder.reserve.unlink(missing_ok=True)
            return write()


def _print_traceback() -> None:
    with suppress(OSError):  # the log's disk may be full
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
