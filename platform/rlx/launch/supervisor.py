"""Supervises one run: `python -m rlx.launch.supervisor RUN_ID`, with RLX_RUN_REGISTRY set.

The supervisor waits for devices, starts the ranks (`rlx.launch.rank`), sends the run's heartbeat,
sends its records to trackers and records how the run ended. The registry decides that, not an exit
code: a run has finished only if its first rank recorded "completed". Ranks that are killed or hang
are restarted from the newest checkpoint.

The number of an attempt is its fencing token. Once a later attempt has started, the registry
rejects what this supervisor and its ranks write, and they exit.

A run must be able to record that its disk is full. Its folder therefore holds a reserve, which the
first process that meets the full disk deletes; then trackers are sent no more.
"""

import errno
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlx.descendants import adopt_orphans, kill_descendants
from rlx.errors import RlxError
from rlx.home import ATTEMPT, REGISTRY, RunFolder
from rlx.launch.failures import (
    convert_to_rlx_error,
    describe_error,
    describe_signal,
    hold_reserve,
    is_disk_full,
)
from rlx.launch.launcher import (
    LocalLauncher,
    RankProcesses,
    find_job_launcher,
    list_startable_statuses,
    open_launcher,
)
from rlx.launch.machine import build_cuda_environment, build_device_request
from rlx.launch.processes import (
    TIMESTAMP,
    SigtermListener,
    child_environment,
    open_temporary_folder,
    signal_ranks,
    stamp_output,
    this_machine,
)
from rlx.launch.run_access import (
    attempts_used,
    fail_unless_started,
    is_spec_of_run,
    load_resolved_spec,
    locate_run_folder,
)
from rlx.progress import print_to_log
from rlx.record import TrackerThreads, list_tracker_settings, retry_registry_call
from rlx.spec import ExperimentSpec, LocalLauncherSpec
from rlx.stopwatch import CLOCK, Stopwatch
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

HEARTBEAT_INTERVAL = 10.0
"""Seconds between heartbeats."""
POLL_INTERVAL = 0.05
"""Seconds between two polls of the ranks."""
DEVICE_POLL_INTERVAL = 1.0
"""Seconds between two checks for free devices."""
STOP_GRACE = 30.0
"""Seconds that ranks have to exit once they are asked to stop."""
DESCENDANTS_GRACE = 5.0
"""Seconds that the processes which ranks started have to exit after them."""

T = TypeVar("T")


class AttemptEnd(NamedTuple):
    """How an attempt ended.

    Attributes:
        status: the run's status, unless another attempt is made.
        reason: why it ended; None if it finished.
        exit_code: of the command that follows the run.
        again: whether another attempt may succeed.
    """

    status: Status
    reason: str | None = None
    exit_code: int = 1
    again: bool = False


def build_failed_end(folder: RunFolder, error: Exception) -> AttemptEnd:
    if is_disk_full(error):
        folder.reserve.unlink(missing_ok=True)
    rlx_error = convert_to_rlx_error(error)
    if rlx_error is None:
        return AttemptEnd("failed", f"the supervisor failed: {describe_error(error)}")
    return AttemptEnd("failed", str(rlx_error), rlx_error.exit_code)


class HangWatch:
    """Measures how long ranks have not replaced their file of progress, not counting pauses of this
    process."""

    def __init__(self, progress: Path, stopwatch: Stopwatch) -> None:
        self._progress, self._stopwatch = progress, stopwatch
        self._seen = self._identify_progress()

    def measure_silence(self) -> float:
        """Returns the seconds since the last progress."""
        before, self._seen = self._seen, self._identify_progress()
        if self._seen != before:
            self._stopwatch.restart()
        return self._stopwatch.look()

    def _identify_progress(self) -> tuple[int, int] | None:
        """What changes whenever the file is replaced; no time is compared with the clock."""
        try:
            stat = self._progress.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns


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
                hold_reserve(folder.reserve)
                registry.update_run(run_id, pid=os.getpid(), host=this_machine())
            devices = build_device_request(spec)
            started = _wait_for_start(registry, run_id, expect, devices, orders, folder.root)
        if started is None:
            if registry.run(run_id).status in ENDED:  # else another supervisor has it
                folder.reserve.unlink(missing_ok=True)
            return 1
        supervisor = _Supervisor(registry, run_id, spec, folder, devices, orders, registry)
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
    """Names an earlier run that still waits on this machine, or one that needs many devices could
    starve; empty if there is none."""
    if devices is None:
        return ""
    waiting = [r for r in registry.runs(statuses=["submitted"]) if r.host == devices.host]
    first = min(waiting, key=lambda r: r.created, default=None)
    return "" if first is None or first.id == run_id else f"{first.id} has waited longer"


@dataclass(slots=True)
class _Supervisor:
    """Runs the ranks of a run to their end.

    Attributes:
        devices: what the run takes; None if it need not queue for it.
        orders: stop and kill requests, polled several times a second.
        writer: the registry, as the current attempt writes to it.
    """

    registry: Registry
    run_id: str
    spec: ExperimentSpec
    folder: RunFolder
    devices: DeviceRequest | None
    orders: SigtermListener
    writer: Registry

    def supervise(self, started: StartedAttempt) -> int:
        """Runs the ranks to their end and records it; returns the exit code."""
        self._open_writer(started)
        # Two supervisors may have waited, each of which recorded its pid; this one started the run.
        self._write(
            lambda: self.writer.update_run(self.run_id, pid=os.getpid(), host=this_machine())
        )
        if not self.spec.runner.launcher.submits_jobs:
            record_supervisor(self.folder.root, os.getpid())
        run = retry_registry_call(lambda: self.registry.run(self.run_id))
        trackers = TrackerThreads(
            self.registry.url,
            self.run_id,
            list_tracker_settings(run),
            lambda: self.folder.has_room,
        )
        try:
            end = self._run_attempts(started)
            self._record_end(end)  # once the CPU time of all processes is known
        except BaseException as error:
            trackers.leave()
            if not isinstance(error, FencedError):
                raise
            print_to_log(f"exiting: {error}")
            return 1
        if behind := trackers.end():
            self.writer = self.registry  # which the end of the run does not fence
            self._record_event("tracker_behind", behind, level="warning")
        if retry_registry_call(lambda: self.registry.run(self.run_id)).status in ENDED:
            self.folder.reserve.unlink(missing_ok=True)  # else it has been resumed since
        return 0 if end.status == "finished" else 1

    def _open_writer(self, started: StartedAttempt) -> None:
        self.writer = retry_registry_call(
            lambda: self.registry.as_writer(self.run_id, started.attempt)
        )

    def _run_attempts(self, started: StartedAttempt) -> AttemptEnd:
        """Runs the ranks, and again if that may help; returns how the last attempt ended."""
        number = retry_registry_call(lambda: attempts_used(self.registry, self.run_id))
        while True:
            try:
                end = self._run_attempt(started)
            except FencedError:
                raise
            except Exception as error:  # noqa: BLE001  (recorded: a run must not stay "running")
                end = build_failed_end(self.folder, error)
                with suppress(OSError):  # the log's disk may be full
                    print(redact_passwords(traceback.format_exc()), file=sys.stderr)
            if not end.again or self.orders.stop or number >= self.spec.runner.max_attempts:
                break
            self._record_event("attempt_failed", f"attempt {number}: {end.reason}", level="warning")
            print_to_log(f"attempt {number} failed: {end.reason}; restarting")
            again = self._write(
                partial(
                    self.writer.start, self.run_id, {"running"}, end.reason, devices=self.devices
                )
            )
            if again is None:
                break
            started, number = again, number + 1
            self._open_writer(started)
        launcher = find_job_launcher(self.spec.runner)
        if end.status == "stopped" and launcher and not self.writer.run(self.run_id).request:
            end = AttemptEnd(*launcher.find_stop_status())
        return end

    def _run_attempt(self, started: StartedAttempt) -> AttemptEnd:
        """Runs the ranks until they exit, hang or are asked to stop."""
        if self._has_completed():  # a lost supervisor had only to record it
            return AttemptEnd("finished")
        log_start = self.folder.log.stat().st_size if self.folder.log.exists() else 0
        with open_temporary_folder(self.folder) as temporary:
            ranks, hung = self._start_ranks(started, temporary), False
            try:
                hung = self._watch_ranks(ranks)
                if hung:  # the ranks write their stacks to the log
                    signal_ranks(self.folder.root, signal.SIGUSR1, os.getpid())
                    time.sleep(1.0)
            except BaseException:
                self._end_ranks(ranks, politely=False)
                raise
            self._end_ranks(ranks, politely=not hung)
        if self._has_completed():  # exit codes cannot tell
            return AttemptEnd("finished")
        if self.orders.stop:
            return AttemptEnd(
                "stopped", f"{'killed' if self.orders.kill else 'stopped'} on request"
            )
        if hung:
            patience = f"no progress for {self.spec.runner.hang_after:g} s"
            reason = f"{patience}; the log shows what the ranks were doing"
            return AttemptEnd("failed", reason, again=True)
        return self._describe_failure(ranks, log_start)

    def _start_ranks(self, started: StartedAttempt, temporary: Mapping[str, str]) -> RankProcesses:
        """Starts the ranks, or their launcher, each in its own process group."""
        runner = self.spec.runner
        environment = {
            **child_environment(),
            "OMP_NUM_THREADS": str(runner.threads),
            "RLX_SUPERVISOR": str(os.getpid()),
            **temporary,
            REGISTRY: self.registry.url,
            ATTEMPT: str(started.attempt),
            **build_cuda_environment(started.devices),
        }
        self.folder.failure.unlink(missing_ok=True)
        launcher = open_launcher(runner)
        command = launcher.build_command(self.folder, self.run_id)
        if isinstance(launcher, LocalLauncher):
            ranks = [(command, {**environment, **one}) for one in launcher.list_environments()]
            return RankProcesses(ranks, are_ranks=True)
        if launcher.reads_input:  # its ranks have temporary folders of their machines
            environment.pop("TMPDIR", None)
            environment |= {k: v for k, v in os.environ.items() if k == "TMPDIR"}
        only = [(command, environment)]
        return RankProcesses(only, are_ranks=False, reads_input=launcher.reads_input)

    def _watch_ranks(self, ranks: RankProcesses) -> bool:
        """Waits until the ranks exit, hang or are asked to stop; returns whether they hang."""
        patience = self.spec.runner.hang_after
        look = min(HEARTBEAT_INTERVAL, patience / 4)
        watch = HangWatch(self.folder.progress, Stopwatch(look, CLOCK.now))
        while ranks.poll() is None and not self.orders.stop:
            self._send_heartbeat()
            until = CLOCK.now() + look
            while CLOCK.now() < until and not self.orders.stop and ranks.poll() is None:
                time.sleep(POLL_INTERVAL)
            if watch.measure_silence() > patience and ranks.poll() is None:
                return True
        return False

    def _end_ranks(self, ranks: RankProcesses, *, politely: bool) -> None:
        """Ends the ranks, their launcher and all that they started."""
        if politely and ranks.is_alive():
            ranks.stop()
            waited = Stopwatch(4 * POLL_INTERVAL)
            while waited.look() < STOP_GRACE and not self.orders.kill and ranks.is_alive():
                time.sleep(POLL_INTERVAL)
        ranks.kill()
        signal_ranks(self.folder.root, signal.SIGKILL, os.getpid())
        kill_descendants(DESCENDANTS_GRACE)

    def _describe_failure(self, ranks: RankProcesses, log_start: int) -> AttemptEnd:
        """How the attempt failed; its part of the log begins at byte `log_start`."""
        code = ranks.poll()
        with self.folder.log.open("rb") as file:
            file.seek(log_start)
            log = file.read().decode(errors="replace")
        # torchrun ends the peers of a failed rank with SIGTERM.
        killed = [n for n in re.findall(r"exitcode\s*:\s*-(\d+)", log) if int(n) != signal.SIGTERM]
        if code is not None and code < 0 and ranks.are_ranks:
            killed = [str(-code)]
        file_ = self.folder.failure
        failure = json.loads(file_.read_text()) if file_.exists() else {}
        if failure and not (failure["again"] and killed):  # a lost peer follows from a killed rank
            return AttemptEnd(
                "failed", str(failure["message"]), int(failure["exit_code"]), failure["again"]
            )
        if not self.folder.has_room:  # a rank could not write its failure
            return build_failed_end(self.folder, OSError(errno.ENOSPC, "disk full", str(file_)))
        if killed:
            why = f"a rank was {describe_signal(int(killed[-1]))}"
        elif code is not None and code < 0:
            why = f"the process that starts the ranks was {describe_signal(-code)}"
        else:
            error = rf"^(?:{TIMESTAMP})?(\S*(?:Error|Exception|Killed|Fault)\b.*)$"
            errors = re.findall(error, log, re.MULTILINE)
            last = errors[-1] if errors else "no error in the log"
            why = f"the ranks ended with code {code}: {last}"
        return AttemptEnd("failed", why, again=True)

    def _send_heartbeat(self) -> None:
        """Sends a heartbeat and applies requests from the registry."""
        try:
            if not self.writer.heartbeat(self.run_id):
                self.orders.stop = True  # the run was ended elsewhere
            self.orders.apply_request(self.writer.run(self.run_id).request)
        except DatabaseUnwritableError:
            raise
        except DatabaseUnavailableError as error:  # the ranks continue; their writes wait
            print_to_log(f"heartbeat failed: {error}")

    def _has_completed(self) -> bool:
        events = retry_registry_call(lambda: self.writer.results.events(self.run_id))
        return any(event.kind == "completed" for event in events)

    def _record_end(self, end: AttemptEnd) -> None:
        # Usage on other machines is unknown.
        if isinstance(self.spec.runner.launcher, LocalLauncherSpec):
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._record_event(
                "resources",
                "CPU time and peak memory of the ranks and their child processes",
                {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024},
            )
        if end.status == "failed":
            payload = {"exit_code": end.exit_code}
            self._record_event("failed", end.reason or "", payload, level="error")
        if end.status == "finished" and not self.spec.keeps_finished_checkpoints:
            for folder in (self.folder.checkpoints, self.folder.origin):
                shutil.rmtree(folder, ignore_errors=True)
        forget_supervisor(self.folder.root)  # who has just read "running" must not find it dead
        self._write(
            lambda: self.writer.transition(self.run_id, {"running"}, end.status, end.reason)
        )

    def _record_event(
        self,
        kind: str,
        message: str,
        payload: dict[str, Any] | None = None,
        level: str = "info",
    ) -> None:
        self._write(
            lambda: self.writer.results.add_event(self.run_id, kind, message, payload, level=level)
        )

    def _write(self, write: Callable[[], T]) -> T:
        """Writes to the registry; if the disk is full, deletes the reserve and tries again."""
        try:
            return retry_registry_call(write)
        except DatabaseUnwritableError as error:
            if not is_disk_full(error):
                raise
            self.folder.reserve.unlink(missing_ok=True)
            return write()


if __name__ == "__main__":
    stamp_output()
    sys.exit(main(*sys.argv[1:]))
