"""The supervisor of one run: `python -m rlx.run.supervise RUN_ID REGISTRY_URL`.

It starts the ranks, keeps the run's heartbeat, feeds the MLflow mirror, and says how it ended. The
durable record decides that, not an exit code: only a run whose first rank recorded "completed" has
finished. Ranks that were killed, or hang, are started again and go on from the newest checkpoint.

A run on a full disk must still be able to say so: its folder holds a reserve, which whoever meets
the full disk first gives up. Once it is gone the mirror writes no more, for its store may lie on
the same disk.
"""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlx.record.mirror import MirrorDown, MlflowMirror
from rlx.run.launch import child_environment, failed_unless_started
from rlx.run.paths import RunFolder, home, tracking_url
from rlx.run.processes import live_ranks
from rlx.run.report import draw
from rlx.run.trouble import as_fault, is_disk_full, message
from rlx.spec import ExperimentSpec
from rlx_registry import Registry, Status, Unwritable

__all__ = ["main"]

HEARTBEAT = 10.0
"""Seconds between signs of life, and between deliveries to the mirror."""
GRACE = 30.0
"""Seconds that ranks have to end after SIGTERM."""
FINAL_TRIES = 3

T = TypeVar("T")


class End(NamedTuple):
    """How an attempt ended: its status, the reason, the exit code for whoever follows the run, and
    whether another attempt may fare better."""

    status: Status
    reason: str | None = None
    exit_code: int = 1
    again: bool = False


def main(run_id: str, registry_url: str) -> int:
    """Supervises one attempt of a run."""
    stopped = threading.Event()
    # Before the run is ours to be stopped, or an early SIGTERM would leave it "running" for ever.
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with Registry.open(registry_url) as registry:
        with failed_unless_started(registry, run_id):
            supervisor = _Supervisor(registry, run_id, registry_url, stopped)
            registry.update_run(run_id, pid=os.getpid())
            if not registry.transition(run_id, {"submitted"}, "running"):
                print(f"{run_id} is not waiting to be started", flush=True)
                return 1
        return supervisor.supervise()


class _Supervisor:
    def __init__(
        self, registry: Registry, run_id: str, registry_url: str, stopped: threading.Event
    ) -> None:
        self._registry = registry
        self._run_id = run_id
        self._registry_url = registry_url
        self._folder = RunFolder(Path(registry.run(run_id).directory or ""))
        self._spec = ExperimentSpec.model_validate_json(self._folder.resolved.read_text())
        self._stopped = stopped
        self._ended = threading.Event()
        self._began = time.time()

    def supervise(self) -> int:
        """Runs the ranks to their end and records it."""
        mirror = threading.Thread(target=self._mirror, name="mirror")
        mirror.start()
        try:
            end = self._attempts()
        except Exception as error:  # noqa: BLE001  (recorded: a run must not stay "running")
            end = self._failure(error)
            self._complain()
        try:
            if end.status == "failed":
                self._tell("failed", end.reason or "", {"exit_code": end.exit_code}, level="error")
            self._write(
                lambda: self._registry.transition(self._run_id, {"running"}, end.status, end.reason)
            )
        finally:
            self._ended.set()
            mirror.join()
            self._folder.reserve.unlink(missing_ok=True)
        return 0 if end.status == "finished" else 1

    def _attempts(self) -> End:
        """Runs the ranks, again where that may help; returns how the run has ended."""
        end = self._attempt()
        for number in range(1, self._spec.runner.max_attempts):
            if not end.again or self._stopped.is_set():
                break
            self._tell("attempt_failed", f"attempt {number}: {end.reason}", level="warning")
            _note(f"attempt {number} failed: {end.reason}; starting again")
            self._begin_again(end.reason)
            end = self._attempt()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._tell(
            "resources",
            "processor time and peak memory of the ranks and all that they started",
            {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024},
        )
        return end

    def _begin_again(self, reason: str | None) -> None:
        self._write(lambda: self._registry.transition(self._run_id, {"running"}, "running", reason))

    def _attempt(self) -> End:
        """Runs the ranks until they end, or hang; returns how the attempt has ended."""
        said_before = self._folder.log.stat().st_size if self._folder.log.exists() else 0
        ranks, hung = self._start_ranks(), False
        patience = self._spec.runner.hang_after
        try:
            while ranks.poll() is None and not self._stopped.is_set() and not hung:
                if not self._registry.heartbeat(self._run_id):
                    self._stopped.set()  # somebody else has ended the run
                self._wait(ranks, min(HEARTBEAT, patience / 4))
                hung = ranks.poll() is None and self._silence() > patience
            if hung:
                self._ask_where()
        finally:
            _end(ranks, self._folder.root)
        if hung and not self._stopped.is_set():
            reason = f"no progress for {patience:g} s; the log has what the ranks were doing"
            return End("failed", reason, again=True)
        end = self._verdict(ranks.returncode, said_before)
        if end.status == "finished":
            try:
                draw(self._registry, self._run_id, self._folder)
            except Exception as error:  # noqa: BLE001  (recorded: the results stand without it)
                told = f"the pictures could not be drawn: {message(error)}"
                self._tell("report_failed", told, level="error")
                self._complain()
        return end

    def _silence(self) -> float:
        """Seconds since the ranks last told of progress, or were started."""
        try:
            last = self._folder.progress.stat().st_mtime
        except OSError:
            last = 0.0
        return time.time() - max(last, self._began)

    def _ask_where(self) -> None:
        """Has ranks that hang write their stacks into the log."""
        for pid in live_ranks(self._folder.root):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)

    # Recording -------------------------------------------------------------------------------

    def _tell(
        self,
        kind: str,
        message: str,
        payload: dict[str, Any] | None = None,
        level: str = "info",
    ) -> None:
        self._write(
            lambda: self._registry.add_event(self._run_id, kind, message, payload, level=level)
        )

    def _write(self, write: Callable[[], T]) -> T:
        """Writes to the registry; gives up the reserve where the disk is full."""
        try:
            return write()
        except Unwritable as error:
            if not is_disk_full(error):
                raise
            self._folder.reserve.unlink(missing_ok=True)
            return write()

    def _failure(self, error: Exception) -> End:
        """How a run ends whose supervisor cannot go on."""
        if is_disk_full(error):
            self._folder.reserve.unlink(missing_ok=True)
        told = as_fault(error)
        if told is None:
            return End("failed", f"the supervisor failed: {message(error)}")
        return End("failed", str(told), told.exit_code)

    @staticmethod
    def _complain() -> None:
        with suppress(OSError):  # the log's disk may be full
            traceback.print_exc()

    # Ranks -----------------------------------------------------------------------------------

    def _wait(self, ranks: "subprocess.Popen[bytes]", seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stopped.is_set():
            try:
                ranks.wait(timeout=0.25)
                return
            except subprocess.TimeoutExpired:
                continue

    def _start_ranks(self) -> "subprocess.Popen[bytes]":
        """torchrun in a process group of its own: it ends its ranks whenever it ends."""
        runner = self._spec.runner
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={runner.ranks}", "-m", "rlx.run.rank"]
        environment = {**child_environment(), "OMP_NUM_THREADS": str(runner.threads)}
        environment["RLX_SUPERVISOR"] = str(os.getpid())
        self._folder.failure.unlink(missing_ok=True)
        self._began = time.time()
        return subprocess.Popen(
            [*command, str(self._folder.root), self._run_id, self._registry_url],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )

    def _verdict(self, code: int | None, said_before: int) -> End:
        """How an attempt ended whose first words begin at a byte of the log."""
        if any(e.kind == "completed" for e in self._registry.events(self._run_id)):
            return End("finished")
        if self._stopped.is_set():
            return End("stopped", "stopped on request")
        log = self._folder.log.read_bytes()[said_before:].decode(errors="replace")
        # torchrun itself ends the peers of a rank that failed, by SIGTERM.
        killed = [n for n in re.findall(r"exitcode\s*:\s*-(\d+)", log) if int(n) != signal.SIGTERM]
        said = json.loads(self._folder.failure.read_text()) if self._folder.failure.exists() else {}
        if said and not (said["again"] and killed):  # a killed rank is why another lost its peer
            return End("failed", str(said["message"]), int(said["exit_code"]), said["again"])
        if not self._has_room():  # and there was no room for a rank's own words
            return self._failure(OSError(errno.ENOSPC, "disk full", str(self._folder.failure)))
        if killed:
            number = int(killed[-1])
            name = signal.Signals(number).name
            hint = "; out of memory?" if number == signal.SIGKILL else ""
            why = f"a rank was killed by signal {number} ({name}{hint})"
            return End("failed", why, again=True)
        errors = re.findall(r"^\S*(?:Error|Exception|Killed|Fault)\b.*$", log, re.MULTILINE)
        last = errors[-1] if errors else "it said nothing"
        return End("failed", f"the ranks ended with code {code}: {last}", again=True)

    # Mirror ----------------------------------------------------------------------------------

    def _mirror(self) -> None:
        """Delivers to MLflow until the run has ended and all is there, or MLflow stays away."""
        uri = self._spec.tracking.mlflow
        if uri is None:
            return
        with Registry.open(self._registry_url) as registry:
            mirror = MlflowMirror(registry, self._run_id, tracking_url(uri), home() / "mlartifacts")
            begun = False
            while not self._ended.wait(HEARTBEAT if begun else 0.1) and self._has_room():
                try:
                    if not begun:
                        mirror.begin()
                        begun = True
                    mirror.deliver()
                except MirrorDown as error:
                    _note(f"mirror: {error}")
                    self._ended.wait(HEARTBEAT)
            self._ended.wait()
            for attempt in range(FINAL_TRIES if self._has_room() else 0):
                try:
                    mirror.begin()
                    mirror.finish(registry.run(self._run_id).status)
                    return
                except MirrorDown as error:
                    _note(f"mirror: {error}")
                    time.sleep(2**attempt)
        why = "could not be reached" if self._has_room() else "is not told more: the disk is full"
        told = f"MLflow {why}; the registry holds everything, and `rlx sync` tells it later"
        self._tell("mirror_behind", told, level="warning")

    def _has_room(self) -> bool:
        """Whether nobody has met a full disk."""
        return self._folder.reserve.exists()


def _note(line: str) -> None:
    with suppress(OSError):  # the log's disk may be full
        print(line, flush=True)


def _end(ranks: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Ends torchrun and the ranks, politely first, and leaves none behind."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        if ranks.poll() is not None:
            break
        os.killpg(ranks.pid, number)
        try:
            ranks.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            continue
    for pid in live_ranks(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(ranks.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
