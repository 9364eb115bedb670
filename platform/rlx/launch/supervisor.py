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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from rlx.descendants import adopt_orphans, kill_descendants
from rlx.errors import RlxError
from rlx.home import ATTEMPT, REGISTRY, RunFolder
from rlx.launch.devices import build_cuda_environment, build_device_request
from rlx.launch.failures import convert_to_rlx_error, describe_error, describe_signal, is_disk_full
from rlx.launch.launcher import (
    LocalLauncher,
    find_job_launcher,
    list_startable_statuses,
    open_launcher,
    restore_disk_reserve,
)
from rlx.launch.processes import (
    TIMESTAMP,
    RankProcesses,
    SigtermListener,
    StartCommand,
    is_rank,
    list_live_ranks,
    open_temporary_folder,
    stamp_output,
    this_machine,
)
from rlx.launch.run_access import is_spec_of_run, load_resolved_spec, locate_run_folder, put_spec
from rlx.launch.start_stop import attempts_used
from rlx.launch.submission import child_environment, fail_unless_started
from rlx.progress import print_to_log
from rlx.record import TrackerThreads, list_tracker_settings, retry_registry_call
from rlx.spec import ExperimentSpec, LocalLauncherSpec
from rlx.stopwatch import CLOCK, Clock, Stopwatch
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


STOP_GRACE = 30.0
"""Seconds that ranks have to exit once they are asked to stop."""


DESCENDANTS_GRACE = 5.0
"""Seconds that the processes which ranks started have to exit after them."""


class AttemptEnd(NamedTuple):
    """How an attempt ended.

    Attributes:
        status: the run's status, unless another attempt is made.
        reason: why it ended; None if it finished.
        exit_code: of the command that follows the run.
        again: whether another attempt may succeed.
        needs_smaller_batches: whether a GPU had no memory for a micro-batch.
        lacks_gpu_memory: whether a GPU ran out of memory, in any part of a step.
    """

    status: Status
    reason: str | None = None
    exit_code: int = 1
    again: bool = False
    needs_smaller_batches: bool = False
    lacks_gpu_memory: bool = False


def build_failed_end(folder: RunFolder, error: Exception) -> AttemptEnd:
    """The end of a run whose supervisor failed; frees the disk reserve if the disk is full."""
    if is_disk_full(error):
        folder.reserve.unlink(missing_ok=True)
    rlx_error = convert_to_rlx_error(error)
    if rlx_error is None:
        return AttemptEnd("failed", f"the supervisor failed: {describe_error(error)}")
    return AttemptEnd("failed", str(rlx_error), rlx_error.exit_code)


class Attempt:
    """The ranks of a run, from their start to their end.

    Args:
        run_id: id of the run.
        spec: its experiment.
        folder: its files.
        environment: environment variables of the ranks, in addition to `child_environment`.
        orders: stop and kill requests, polled several times a second.
        clock: tells how long ranks have made no progress.
    """

    def __init__(
        self,
        run_id: str,
        spec: ExperimentSpec,
        folder: RunFolder,
        environment: Mapping[str, str],
        orders: SigtermListener,
        clock: Clock = CLOCK,
    ) -> None:
        self._run_id, self._spec, self._folder = run_id, spec, folder
        self._environment, self._orders, self._clock = environment, orders, clock

    def run(
        self,
        beat: Callable[[], None],
        completed: Callable[[], bool],
        report_pause: Callable[[bool], None],
    ) -> AttemptEnd:
        """Runs the ranks until they exit, hang or are asked to stop.

        Args:
            beat: called at least every `HEARTBEAT_INTERVAL` seconds; an exception ends the ranks.
            completed: whether the registry records the run as completed; exit codes cannot tell.
            report_pause: called with True when ranks are found stopped, with False when they go on.
        """
        log_start = self._folder.log.stat().st_size if self._folder.log.exists() else 0
        patience = self._spec.runner.hang_after
        with open_temporary_folder(self._folder) as temporary:
            ranks, hung = self._start(temporary), False
            try:
                hung = self._watch(ranks, beat, report_pause)
                if hung:
                    self._dump_stacks()
            except BaseException:
                self._end(ranks, politely=False)
                raise
            self._end(ranks, politely=not hung)
        if completed():
            return AttemptEnd("finished")
        if self._orders.stop:
            return AttemptEnd(
                "stopped", "killed on request" if self._orders.kill else "stopped on request"
            )
        if hung:
            reason = f"no progress for {patience:g} s; the log shows what the ranks were doing"
            return AttemptEnd("failed", reason, again=True)
        return self._build_attempt_end(ranks, log_start)

    def _watch(
        self,
        ranks: RankProcesses,
        beat: Callable[[], None],
        report_pause: Callable[[bool], None],
    ) -> bool:
        """Waits until the ranks exit, hang or are asked to stop; returns whether they hang."""
        patience, paused = self._spec.runner.hang_after, False
        look = min(HEARTBEAT_INTERVAL, patience / 4)
        stopwatch = Stopwatch(look, self._clock.now)
        watch = HangWatch(self._folder.progress, str(self._folder.root), stopwatch)
        while ranks.poll() is None and not self._orders.stop:
            beat()
            self._wait(ranks, look)
            silent = watch.measure_silence(ranks.pids)
            if silent > patience and ranks.poll() is None:
                return True
            if watch.paused != paused:
                paused = watch.paused
                report_pause(paused)
        return False

    def _start(self, temporary: Mapping[str, str]) -> RankProcesses:
        """Starts the ranks, or their launcher, each in its own process group."""
        runner = self._spec.runner
        own = {"OMP_NUM_THREADS": str(runner.threads), "RLX_SUPERVISOR": str(os.getpid())}
        environment = {**child_environment(), **own, **temporary, **self._environment}
        self._folder.failure.unlink(missing_ok=True)
        launcher = open_launcher(runner)
        command = launcher.build_command(self._folder, self._run_id)
        if isinstance(launcher, LocalLauncher):
            ranks = [StartCommand(command, own) for own in launcher.list_environments()]
            return RankProcesses(ranks, environment, are_ranks=True)
        if launcher.reads_input:  # its ranks have temporary folders of their machines
            environment.pop("TMPDIR", None)
            environment |= {k: v for k, v in os.environ.items() if k == "TMPDIR"}
        return RankProcesses(
            [StartCommand(command)], environment, are_ranks=False, reads_input=launcher.reads_input
        )

    def _wait(self, ranks: RankProcesses, seconds: float) -> None:
        until = self._clock.now() + seconds
        while self._clock.now() < until and not self._orders.stop and ranks.poll() is None:
            self._clock.pause(POLL_INTERVAL)

    def _dump_stacks(self) -> None:
        """Makes hung ranks write their stacks to the log."""
        for pid in list_live_ranks(self._folder.root, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        self._clock.pause(1.0)

    def _end(self, ranks: RankProcesses, *, politely: bool) -> None:
        """Ends the ranks, their launcher and all that they started."""
        if politely and ranks.is_alive():
            ranks.stop()
            waited = Stopwatch(4 * POLL_INTERVAL, self._clock.now)
            while waited.look() < STOP_GRACE and not self._orders.kill and ranks.is_alive():
                self._clock.pause(POLL_INTERVAL)
        ranks.kill()
        for pid in list_live_ranks(self._folder.root, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        kill_descendants(DESCENDANTS_GRACE)

    def _build_attempt_end(self, ranks: RankProcesses, log_start: int) -> AttemptEnd:
        """How the attempt failed; its part of the log begins at byte `log_start`."""
        code = ranks.poll()
        log = _read_log_tail(self._folder.log, log_start)
        # torchrun ends the peers of a failed rank with SIGTERM.
        killed = [n for n in re.findall(r"exitcode\s*:\s*-(\d+)", log) if int(n) != signal.SIGTERM]
        if code is not None and code < 0 and ranks.are_ranks:
            killed = [str(-code)]
        failure_file = self._folder.failure
        failure = json.loads(failure_file.read_text()) if failure_file.exists() else {}
        if failure and not (failure["again"] and killed):  # a lost peer follows from a killed rank
            return AttemptEnd(
                "failed",
                str(failure["message"]),
                int(failure["exit_code"]),
                failure["again"],
                failure.get("needs_smaller_batches", False),
                failure.get("lacks_gpu_memory", False),
            )
        if not self._folder.has_room:  # a rank could not write its failure
            return build_failed_end(
                self._folder, OSError(errno.ENOSPC, "disk full", str(failure_file))
            )
        if killed:
            why = f"a rank was {describe_signal(int(killed[-1]))}"
            return AttemptEnd("failed", why, again=True)
        if code is not None and code < 0:
            why = f"the process that starts the ranks was {describe_signal(-code)}"
            return AttemptEnd("failed", why, again=True)
        error = rf"^(?:{TIMESTAMP})?(\S*(?:Error|Exception|Killed|Fault)\b.*)$"
        errors = re.findall(error, log, re.MULTILINE)
        last = errors[-1] if errors else "no error in the log"
        return AttemptEnd("failed", f"the ranks ended with code {code}: {last}", again=True)


def _read_log_tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


_CGROUPS = Path("/sys/fs/cgroup")


class HangWatch:
    """Measures how long ranks have run without progress.

    The time in which this process was paused itself does not count (see `Stopwatch`), and neither
    does that in which a rank on this machine is stopped.

    Args:
        progress: the file that the ranks replace with every progress.
        mark: an argument on the command lines of the ranks.
        stopwatch: measures the time between looks.

    Attributes:
        paused: whether a rank was stopped at the last look.
    """

    def __init__(self, progress: Path, mark: str, stopwatch: Stopwatch) -> None:
        self._progress, self._mark, self._stopwatch = progress, mark, stopwatch
        self._seen = self._identify_progress()
        self.paused = False

    def measure_silence(self, started: Iterable[int]) -> float:
        """Returns the seconds that the ranks have run since their last progress.

        Args:
            started: processes that are ranks, or have started the ranks.
        """
        before, self._seen = self._seen, self._identify_progress()
        self.paused = any(map(_is_stopped, self._list_ranks(started)))
        if self._seen != before:
            self._stopwatch.restart()
        elif self.paused:
            self._stopwatch.skip()
        else:
            self._stopwatch.look()
        return self._stopwatch.seconds

    def _identify_progress(self) -> tuple[int, int] | None:
        """What changes whenever the file is replaced; no time is compared with the clock."""
        try:
            stat = self._progress.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def _list_ranks(self, started: Iterable[int]) -> Iterator[psutil.Process]:
        for pid in started:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    with suppress(psutil.Error):
                        if is_rank(each, self._mark):
                            yield each


def _is_stopped(process: psutil.Process) -> bool:
    """Whether a process is stopped by a signal or a debugger, or its control group is frozen."""
    try:
        if process.status() in _STOPPED:
            return True
        groups = Path(f"/proc/{process.pid}/cgroup").read_text()
    except (psutil.Error, OSError):
        return False
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        here = path.lstrip("/")
        files: tuple[Path, ...] = ()
        if "freezer" in controllers.split(","):
            files = (_CGROUPS / "freezer" / here / "freezer.state",)
        elif not controllers:  # version 2, alone or beside version 1
            files = tuple(_CGROUPS / top / here / "cgroup.events" for top in ("", "unified"))
        if any(map(_says_frozen, files)):
            return True
    return False


def _says_frozen(file: Path) -> bool:
    """Whether a state file of a control group can be read and says that the group is frozen."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return False
    return not {"frozen 1", "FROZEN", "FREEZING"}.isdisjoint(lines)


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
    waiting = [r for r in registry.runs(statuses=["submitted"]) if r.host == devices.host]
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
