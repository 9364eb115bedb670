"""Supervises one run: `python -m rlx.launch.supervisor RUN_ID`, with RLX_RUN_REGISTRY set.

The supervisor waits for devices, starts the ranks, sends the run's heartbeat, sends its records to
trackers and records how the run ended. The registry decides that, not an exit code: a run has
finished only if its first rank recorded "completed". Ranks that are killed or hang are restarted
from the newest checkpoint.

The number of an attempt is its fencing token. Once a later attempt has started, the registry
rejects what this supervisor and its ranks write, and they exit.

A run must be able to record that its disk is full. Its folder therefore holds a reserve, which the
first process that meets the full disk deletes. After that trackers are sent no more, because their
store may be on the same disk.
"""

import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlx.descendants import adopt_orphans
from rlx.errors import RlxError
from rlx.home import ATTEMPT, REGISTRY, RunFolder
from rlx.launch.attempt import Attempt, AttemptEnd, build_failed_end
from rlx.launch.devices import build_cuda_environment, build_device_request
from rlx.launch.failures import describe_error, is_disk_full
from rlx.launch.launcher import find_job_launcher, list_startable_statuses, restore_disk_reserve
from rlx.launch.processes import SigtermListener, stamp_output, this_machine
from rlx.launch.run_access import is_spec_of_run, load_resolved_spec, locate_run_folder, put_spec
from rlx.launch.start_stop import attempts_used
from rlx.launch.submission import fail_unless_started
from rlx.progress_callbacks import print_to_log
from rlx.record import TrackerThreads, list_tracker_settings, retry_registry_call
from rlx.spec import ExperimentSpec, LocalLauncherSpec
from rlx.text import redact_passwords
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
    forget_supervisor,
    record_supervisor,
)

DEVICE_POLL_INTERVAL = 1.0
"""Seconds between two checks for free devices."""

T = TypeVar("T")


def main(run_id: str) -> int:
    """Supervises a run from its start or newest checkpoint to its end; returns the exit code."""
    orders = SigtermListener()  # first: an early SIGTERM would leave the run "running" forever
    adopt_orphans()  # so that nothing that the ranks started can outlive them
    with retry_registry_call(lambda: Registry.open(os.environ[REGISTRY])) as registry:
        with fail_unless_started(registry, run_id):
            run = retry_registry_call(lambda: registry.run(run_id))
            folder = locate_run_folder(run)
            spec = load_resolved_spec(folder)
            if not is_spec_of_run(spec, run):
                raise RlxError(f"{folder.root} belongs to a run of another registry")
            expect = list_startable_statuses(spec.runner, run)
            if run.status in expect:
                restore_disk_reserve(spec.runner, folder)
                registry.update_run(run_id, pid=os.getpid(), host=this_machine())
            devices = build_device_request(spec)
            started = _wait_for_start(registry, run_id, expect, devices, orders, folder.root)
        if started is None:
            if registry.run(run_id).status in ENDED:  # else another supervisor has it
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
    folder: Path,
) -> StartedAttempt | None:
    """Starts the run once its devices are free; None if it was started elsewhere or stopped."""
    reported = False
    while not orders.stop:
        why = retry_registry_call(lambda: _describe_earlier_run(registry, run_id, devices))
        try:
            if not why:
                started = retry_registry_call(
                    lambda: registry.start(run_id, expect, devices=devices)
                )
                if started is None:
                    print_to_log(f"{run_id} is not waiting to start")
                return started
        except DevicesBusyError as busy:
            why = str(busy)
        if not reported:
            reported = True
            print_to_log(f"waiting: {why}")
            retry_registry_call(partial(registry.results.add_event, run_id, "waiting", why))
        if not retry_registry_call(lambda: registry.heartbeat(run_id)):
            return None
        run = retry_registry_call(lambda: registry.run(run_id))
        if run.pid not in (None, os.getpid()):
            print_to_log(f"{run_id} has another supervisor, process {run.pid}")
            return None
        orders.apply_request(run.request)
        time.sleep(DEVICE_POLL_INTERVAL)
    forget_supervisor(folder)
    registry.transition(run_id, expect, "stopped", "stopped before it started")
    return None


def _describe_earlier_run(registry: Registry, run_id: str, devices: DeviceRequest | None) -> str:
    """Names an earlier run that still waits on this machine; empty if there is none.

    Otherwise runs that need few devices could starve one that needs many.
    """
    if devices is None:
        return ""
    waiting = [r for r in registry.runs(status="submitted") if r.host == devices.host]
    first = min(waiting, key=lambda r: r.created, default=None)
    return "" if first is None or first.id == run_id else f"{first.id} has waited longer"


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
        self._is_halved = False

    def supervise(self, started: StartedAttempt) -> int:
        """Runs the ranks to their end and records it; returns the exit code."""
        writer = retry_registry_call(
            lambda: self._registry.as_writer(self._run_id, started.attempt)
        )
        # Two supervisors may have waited, each of which recorded its pid; this one started the run.
        self._write(lambda: writer.update_run(self._run_id, pid=os.getpid(), host=this_machine()))
        if not self._spec.runner.launcher.submits_jobs:
            record_supervisor(self._folder.root, os.getpid())
        run = retry_registry_call(lambda: self._registry.run(self._run_id))
        trackers = TrackerThreads(
            self._registry.url,
            self._run_id,
            list_tracker_settings(run),
            lambda: self._folder.has_room,
        )
        try:
            writer, end = self._run_attempts(writer, started)
            self._record_end(writer, end)  # once the CPU time of all processes is known
        except BaseException as error:
            trackers.leave()
            if not isinstance(error, FencedError):
                raise
            print_to_log(f"exiting: {error}")
            return 1
        if behind := trackers.end():
            self._record_event(self._registry, "tracker_behind", behind, level="warning")
        if retry_registry_call(lambda: self._registry.run(self._run_id)).status in ENDED:
            self._folder.reserve.unlink(missing_ok=True)  # else it has been resumed since
        return 0 if end.status == "finished" else 1

    def _run_attempts(
        self, writer: Registry, started: StartedAttempt
    ) -> tuple[Registry, AttemptEnd]:
        """Runs the ranks, and retries if that may help.

        Returns:
            The writer of the last attempt, and how it ended.
        """
        number = retry_registry_call(lambda: attempts_used(self._registry, self._run_id))
        while True:
            first = self._find_newest_step(writer)
            try:
                end = self._run_attempt(writer, started)
            except FencedError:
                raise
            except Exception as error:  # noqa: BLE001  (recorded: a run must not stay "running")
                end = build_failed_end(self._folder, error)
                _print_traceback()
            if end.needs_smaller_batches and self._halve_micro_batches(writer):
                end = end._replace(again=True)
            elif end.lacks_gpu_memory and self._find_newest_step(writer) > first:
                end = end._replace(again=True)  # new processes have no fragments of memory
            if not end.again or self._orders.stop or number >= self._spec.runner.max_attempts:
                break
            self._record_event(
                writer, "attempt_failed", f"attempt {number}: {end.reason}", level="warning"
            )
            print_to_log(f"attempt {number} failed: {end.reason}; restarting")
            again = self._restart_attempt(writer, end.reason)
            if again is None:
                break
            started, number = again, number + 1
            writer = retry_registry_call(
                partial(self._registry.as_writer, self._run_id, started.attempt)
            )
        launcher = find_job_launcher(self._spec.runner)
        if end.status == "stopped" and launcher and not writer.run(self._run_id).request:
            end = AttemptEnd(*launcher.find_stop_status())
        return writer, end

    def _find_newest_step(self, writer: Registry) -> int:
        """The step of the run's newest checkpoint; 0 if it has none."""
        recorded = retry_registry_call(lambda: writer.results.checkpoints(self._run_id))
        return max((checkpoint.step for checkpoint in recorded), default=0)

    def _halve_micro_batches(self, writer: Registry) -> bool:
        """Halves the micro-batches of the next attempt, once; returns whether it has.

        The gradient of a step is a sum over all of its tokens, however they are divided.
        """
        tokens = self._spec.runner.micro_batch_tokens // 2
        if self._is_halved or not tokens:
            return False
        self._is_halved = True
        runner = self._spec.runner.model_copy(update={"micro_batch_tokens": tokens})
        self._spec = self._spec.model_copy(update={"runner": runner})
        put_spec(self._folder, self._spec)
        message = (
            f"the GPU had no memory for a micro-batch: runner.micro_batch_tokens is {tokens} now"
        )
        print_to_log(message)
        self._record_event(writer, "smaller_batches", message, {"tokens": tokens}, level="warning")
        return True

    def _restart_attempt(self, writer: Registry, reason: str | None) -> StartedAttempt | None:
        devices = self._devices
        return self._write(lambda: writer.start(self._run_id, {"running"}, reason, devices=devices))

    def _run_attempt(self, writer: Registry, started: StartedAttempt) -> AttemptEnd:
        """Runs the ranks once; draws the run's pictures if they have finished."""
        environment = {
            REGISTRY: self._registry.url,
            ATTEMPT: str(started.attempt),
            **build_cuda_environment(started.devices),
        }
        attempt = Attempt(self._run_id, self._spec, self._folder, environment, self._orders)
        if self._has_completed(writer):  # a lost supervisor had only to record it
            end = AttemptEnd("finished")
        else:
            end = attempt.run(
                lambda: self._send_heartbeat(writer),
                lambda: self._has_completed(writer),
                lambda paused: self._record_pause(writer, paused=paused),
            )
        if end.status == "finished" and self._spec.tracking.pictures:
            from rlx.run import draw_run_pictures  # imported here: it takes a second

            try:
                draw_run_pictures(writer, self._run_id, self._folder)
            except FencedError:
                raise
            except Exception as error:  # noqa: BLE001  (recorded: the results are valid without it)
                message = f"the plots could not be drawn: {describe_error(error)}"
                self._record_event(writer, "report_failed", message, level="error")
                _print_traceback()
        return end

    def _send_heartbeat(self, writer: Registry) -> None:
        """Sends a heartbeat and applies requests from the registry."""
        try:
            if not writer.heartbeat(self._run_id):
                self._orders.stop = True  # the run was ended elsewhere
            self._orders.apply_request(writer.run(self._run_id).request)
        except DatabaseUnwritableError:
            raise
        except DatabaseUnavailableError as error:  # the ranks continue; their writes wait
            print_to_log(f"heartbeat failed: {error}")

    def _record_pause(self, writer: Registry, *, paused: bool) -> None:
        kind, message = "continued", "the ranks run again"
        if paused:
            kind, message = "paused", "a rank was paused by a signal; this does not count as a hang"
        print_to_log(f"{kind}: {message}")
        self._record_event(writer, kind, message)

    def _has_completed(self, writer: Registry) -> bool:
        events = retry_registry_call(lambda: writer.results.events(self._run_id))
        return any(event.kind == "completed" for event in events)

    def _record_end(self, writer: Registry, end: AttemptEnd) -> None:
        # Usage on other machines is unknown.
        if isinstance(self._spec.runner.launcher, LocalLauncherSpec):
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._record_event(
                writer,
                "resources",
                "CPU time and peak memory of the ranks and their child processes",
                {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024},
            )
        if end.status == "failed":
            payload = {"exit_code": end.exit_code}
            self._record_event(writer, "failed", end.reason or "", payload, level="error")
        if end.status == "finished" and not self._spec.keeps_finished_checkpoints:
            self._remove_checkpoints(writer)
        forget_supervisor(self._folder.root)  # who has just read "running" must not find it dead
        self._write(lambda: writer.transition(self._run_id, {"running"}, end.status, end.reason))

    def _remove_checkpoints(self, writer: Registry) -> None:
        """Removes what a finished run needs no more; if that fails, the run has finished anyway."""
        for folder in (self._folder.checkpoints, self._folder.origin):
            try:
                if folder.exists():
                    shutil.rmtree(folder)
            except OSError as error:
                message = f"{folder.name} cannot be removed: {describe_error(error)}"
                self._record_event(writer, "checkpoints_left", message, level="warning")

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
        """Writes to the registry; if the disk is full, deletes the reserve and tries again."""
        try:
            return retry_registry_call(write)
        except DatabaseUnwritableError as error:
            if not is_disk_full(error):
                raise
            self._folder.reserve.unlink(missing_ok=True)
            return write()


def _print_traceback() -> None:
    with suppress(OSError):  # the log's disk may be full
        print(redact_passwords(traceback.format_exc()), file=sys.stderr)


if __name__ == "__main__":
    stamp_output()
    sys.exit(main(*sys.argv[1:]))
