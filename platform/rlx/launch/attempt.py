"""Runs one attempt of a run: starts its ranks, watches them, ends them and reports the outcome."""

import errno
import json
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from rlx.descendants import kill_descendants
from rlx.home import RunFolder
from rlx.launch.failures import (
    convert_to_rlx_error,
    describe_error,
    describe_signal,
    is_disk_full,
)
from rlx.launch.launcher import LocalLauncher, open_launcher
from rlx.launch.processes import (
    TIMESTAMP,
    RankProcesses,
    SigtermListener,
    StartCommand,
    is_rank,
    list_live_ranks,
    open_temporary_folder,
)
from rlx.launch.submission import child_environment
from rlx.spec import ExperimentSpec
from rlx.stopwatch import CLOCK, Clock, Stopwatch
from rlx_registry import Status

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
