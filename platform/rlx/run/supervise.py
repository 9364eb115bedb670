"""The supervisor of one run: `python -m rlx.run.supervise RUN_ID REGISTRY_URL`.

It starts the ranks, keeps the run's heartbeat, feeds the MLflow mirror, and says how it ended. The
durable record decides that, not an exit code: only a run whose first rank recorded "completed" has
finished.
"""

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
from pathlib import Path

from rlx.record.mirror import MirrorDown, MlflowMirror
from rlx.run.launch import child_environment
from rlx.run.paths import RunFolder, home, tracking_url
from rlx.run.report import draw
from rlx.spec import ExperimentSpec
from rlx_registry import Registry

__all__ = ["main"]

HEARTBEAT = 10.0
"""Seconds between signs of life, and between deliveries to the mirror."""
GRACE = 30.0
"""Seconds that ranks have to end after SIGTERM."""
FINAL_TRIES = 3


def main(run_id: str, registry_url: str) -> int:
    """Supervises one attempt of a run."""
    stopped = threading.Event()
    # Before the run is ours to be stopped, or an early SIGTERM would leave it "running" for ever.
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with Registry.open(registry_url) as registry:
        if not registry.transition(run_id, {"submitted"}, "running"):
            print(f"{run_id} is not waiting to be started", flush=True)
            return 1
        registry.update_run(run_id, pid=os.getpid())
        return _Supervisor(registry, run_id, registry_url, stopped).supervise()


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

    def supervise(self) -> int:
        """Runs the ranks to their end and records it."""
        mirror = threading.Thread(target=self._mirror, name="mirror")
        mirror.start()
        try:
            status, reason = self._attempt()
        except Exception as error:  # noqa: BLE001  (recorded: a run must not stay "running")
            traceback.print_exc()
            status, reason = "failed", f"the supervisor failed: {type(error).__name__}: {error}"
        self._registry.transition(self._run_id, {"running"}, status, reason)
        self._ended.set()
        mirror.join()
        return 0 if status == "finished" else 1

    def _attempt(self) -> tuple[str, str | None]:
        """Runs the ranks until they end; returns the run's status and the reason for it."""
        ranks = self._start_ranks()
        try:
            while ranks.poll() is None and not self._stopped.is_set():
                if not self._registry.heartbeat(self._run_id):
                    self._stopped.set()  # somebody else has ended the run
                self._wait(ranks, HEARTBEAT)
        finally:
            _end(ranks)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._registry.add_event(
            self._run_id,
            "resources",
            "processor time and peak memory of the ranks and all that they started",
            {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024},
        )
        status, reason = self._verdict(ranks.returncode)
        if status == "finished":
            try:
                draw(self._registry, self._run_id, self._folder)
            except Exception as error:  # noqa: BLE001  (recorded: the results stand without it)
                traceback.print_exc()
                message = f"the pictures could not be drawn: {type(error).__name__}: {error}"
                self._registry.add_event(self._run_id, "report_failed", message, level="error")
        return status, reason

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
        return subprocess.Popen(
            [*command, str(self._folder.root), self._run_id, self._registry_url],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )

    def _verdict(self, code: int | None) -> tuple[str, str | None]:
        if any(e.kind == "completed" for e in self._registry.events(self._run_id)):
            return "finished", None
        if self._stopped.is_set():
            return "stopped", "stopped on request"
        if self._folder.failure.exists():
            return "failed", str(json.loads(self._folder.failure.read_text())["message"])
        log = self._folder.log.read_text(errors="replace")
        killed = re.findall(r"exitcode\s*:\s*-(\d+)", log)
        if killed:
            number = int(killed[-1])
            name = signal.Signals(number).name
            hint = "; out of memory?" if number == signal.SIGKILL else ""
            return "failed", f"a rank was killed by signal {number} ({name}{hint})"
        errors = re.findall(r"^\S*(?:Error|Exception|Killed|Fault)\b.*$", log, re.MULTILINE)
        said = errors[-1] if errors else "it said nothing"
        return "failed", f"the ranks ended with code {code}: {said}"

    def _mirror(self) -> None:
        """Delivers to MLflow until the run has ended and all is there, or MLflow stays away."""
        uri = self._spec.tracking.mlflow
        if uri is None:
            return
        with Registry.open(self._registry_url) as registry:
            mirror = MlflowMirror(registry, self._run_id, tracking_url(uri), home() / "mlartifacts")
            begun = False
            while not self._ended.wait(HEARTBEAT if begun else 0.1):
                try:
                    if not begun:
                        mirror.begin()
                        begun = True
                    mirror.deliver()
                except MirrorDown as error:
                    print(f"mirror: {error}", flush=True)
                    self._ended.wait(HEARTBEAT)
            for attempt in range(FINAL_TRIES):
                try:
                    mirror.begin()
                    mirror.finish(registry.run(self._run_id).status)
                    return
                except MirrorDown as error:
                    print(f"mirror: {error}", flush=True)
                    time.sleep(2**attempt)
            registry.add_event(
                self._run_id,
                "mirror_behind",
                "MLflow could not be reached; the registry holds everything",
                level="warning",
            )


def _end(ranks: "subprocess.Popen[bytes]") -> None:
    """Ends the whole process group, politely first, and leaves none behind."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        if ranks.poll() is not None:
            break
        os.killpg(ranks.pid, number)
        try:
            ranks.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            continue
    try:
        os.killpg(ranks.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
