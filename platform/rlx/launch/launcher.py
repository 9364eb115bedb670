"""How the ranks of a run are started: one interface for every `runner.launcher`; and runs whose
supervisor a job system starts.

A job is the usual supervisor, on a machine that the job system chooses. While a job is pending, its
run is "queued". It is queued again if the job system requeues the job, and resumes.
"""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlx.discovery import import_implementation
from rlx.errors import EnvironmentFault, PluginError
from rlx.home import REGISTRY, RunFolder
from rlx.launch.processes import child_environment, find_free_port
from rlx.launch.run_access import load_resolved_spec
from rlx.spec import ExperimentSpec, RunnerSpec
from rlx_registry import (
    DatabaseUnwritableError,
    Registry,
    RunRecord,
    Status,
    forget_supervisor,
)

if TYPE_CHECKING:
    from rlx.plugin import SamplerPlugin
    from rlx.spec.reading import Diagnostic


class Launcher(ABC):
    """Starts the ranks of a run, on the supervisor's machine or on others.

    Attributes:
        runner: the section `runner`; `runner.launcher` holds the launcher's own settings.
        sampler: the section `sampler`; None where nobody asks what a run takes.
        reads_input: whether the process of its command reads its standard input as a
            `LauncherInput`; others are asked to stop by SIGTERM.
    """

    reads_input: ClassVar[bool] = False

    def __init__(self, runner: RunnerSpec, sampler: "SamplerPlugin | None" = None) -> None:
        self.runner, self.sampler = runner, sampler

    def check(self) -> Iterator["Diagnostic"]:
        """Yields what is wrong on this machine, before a run is recorded."""
        yield from ()

    def count_ranks_here(self) -> int:
        """Number of ranks on the supervisor's machine; 0 if a job system chooses the machine.

        Raises:
            EnvironmentFault: `check` yields an error.
        """
        return self.runner.ranks

    @abstractmethod
    def build_command(self, folder: RunFolder, run_id: str) -> list[str]:
        """The command whose process starts all ranks of an attempt and ends with them."""


class LocalLauncher(Launcher):
    """Starts every rank on the supervisor's machine, as a process of its own."""

    def list_environments(self) -> list[dict[str, str]]:
        """The environment variables of torch.distributed of each rank."""
        count = self.runner.ranks
        port = 0 if count == 1 else find_free_port()  # 0 is any: no peer connects
        return [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for rank in range(count)
        ]

    def build_command(self, folder: RunFolder, run_id: str) -> list[str]:
        return [sys.executable, "-m", "rlx.launch.rank", str(folder.root), run_id]


STOP = b"stop\n"
LAUNCHER_GRACE = 30.0
"""Seconds that a launcher has to end its ranks on all machines once its input has ended."""


class RankProcesses:
    """The ranks of an attempt, whose exit codes are theirs, or the one launcher of all of them,
    which may read a `LauncherInput`; each leads a process group."""

    def __init__(
        self,
        commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
        *,
        are_ranks: bool,
        reads_input: bool = False,
    ) -> None:
        self.are_ranks, self._reads_input = are_ranks, reads_input
        self._failure: int | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for command, environment in commands:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE if reads_input else subprocess.DEVNULL,
                        start_new_session=True,
                        env=environment,
                    )
                )
        except OSError:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def poll(self) -> int | None:
        """Exit code: of the first process that failed, 0 once all have ended, None before that."""
        codes = [process.poll() for process in self._processes]
        # Of several, a signal is the cause: the peers of a killed rank fail.
        self._failure = self._failure or min(filter(None, codes), default=None)
        return self._failure or (None if None in codes else 0)

    def is_alive(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def stop(self) -> None:
        """Asks the ranks to write a checkpoint and exit."""
        for process in self._processes:
            if process.stdin is None:
                process.terminate()
            else:
                with suppress(BrokenPipeError):  # it has ended
                    process.stdin.write(STOP)
                    process.stdin.flush()

    def kill(self) -> None:
        """Ends the processes, and waits for them; a launcher ends its ranks elsewhere first."""
        for process in self._processes:
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LAUNCHER_GRACE)
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()


class LauncherInput:
    """The standard input of a launcher, which the supervisor writes.

    Attributes:
        stop: the ranks should write a checkpoint and exit.
        is_closed: the ranks should end at once; the supervisor may be gone.
    """

    def __init__(self) -> None:
        self.stop = self.is_closed = False

    def receive(self, seconds: float = 0.0) -> None:
        """Takes note of what has arrived; waits for it up to this long."""
        if self.is_closed:
            time.sleep(seconds)
        elif select.select([0], [], [], seconds)[0]:
            received = os.read(0, 4096)
            self.is_closed = not received
            self.stop |= STOP in received


class JobLauncher(Launcher):
    """A launcher whose job system starts the supervisor of each run as a job.

    Attributes:
        title: name of the job system.
    """

    title: ClassVar[str]

    def count_ranks_here(self) -> int:
        return 0

    @abstractmethod
    def submit(
        self,
        spec: ExperimentSpec,
        folder: RunFolder,
        run_id: str,
        script: Path,
        environment: Mapping[str, str],
    ) -> str:
        """Submits a job that runs `script`; returns its id.

        Raises:
            EnvironmentFault: the job system is not installed here, or rejects the job.
        """

    @abstractmethod
    def cancel(self, job: str) -> None:
        """Cancels a job, pending or running; one that is gone is no error.

        Raises:
            EnvironmentFault: the job system does not answer, or refuses.
        """

    @abstractmethod
    def find_status(self, job: str, status: Status) -> tuple[Status, str] | None:
        """The status and reason that the job's state implies for its run; None if `status` is
        correct, or the job system does not answer."""

    @abstractmethod
    def find_stop_status(self) -> tuple[Status, str]:
        """In a supervisor that the job system ended: the status and reason of its run."""

    def count_restarts(self) -> int:
        """In a supervisor: how often the job system has restarted its job."""
        return 0


def open_launcher(runner: RunnerSpec, sampler: "SamplerPlugin | None" = None) -> Launcher:
    """The launcher that the section `runner` names; `sampler` is for those who ask what the run
    takes. Raises PluginError if its implementation cannot be imported."""
    launcher: Launcher = import_implementation(runner.launcher.implementation)(runner, sampler)
    return launcher


def build_torchrun_command(
    place: Iterable[str], ranks: int, folder: Path, run_id: str
) -> list[str]:
    """The torchrun command for one machine's ranks; `place` holds its rendezvous options."""
    command = [sys.executable, "-m", "torch.distributed.run", *place]
    return [*command, f"--nproc-per-node={ranks}", "-m", "rlx.launch.rank", str(folder), run_id]


JOB_SCRIPT = """\
#!/bin/sh
# Run {run} of rlx, as submitted to {title}.
exec {python} -m rlx.launch.supervisor {run}
"""


def find_job_launcher(runner: RunnerSpec) -> JobLauncher | None:
    """The launcher of a run whose supervisor a job system starts; None for other runs.

    Raises:
        PluginError: its implementation cannot be imported, or is no `JobLauncher`.
    """
    if not runner.launcher.submits_jobs:
        return None
    launcher = open_launcher(runner)
    if not isinstance(launcher, JobLauncher):
        raise PluginError(
            f"launcher plugin {runner.launcher.kind!r} submits jobs, and its implementation "
            f"{runner.launcher.implementation} is no rlx.launch.JobLauncher"
        )
    return launcher


def submit_job(registry: Registry, run: RunRecord, registry_url: str) -> None:
    """Submits a queued run as a job, whose id is written to the run's folder.

    Raises:
        EnvironmentFault: the job system is not installed here, or rejects the job.
    """
    folder = RunFolder(Path(run.directory or ""))
    spec = load_resolved_spec(folder)
    launcher = find_job_launcher(spec.runner)
    assert launcher is not None
    script = folder.root / "job.sh"
    script.write_text(
        JOB_SCRIPT.format(run=run.id, title=launcher.title, python=shlex.quote(sys.executable))
    )
    script.chmod(0o755)
    environment = {**child_environment(), REGISTRY: registry_url}
    job = launcher.submit(spec, folder, run.id, script, environment)
    aside = folder.job.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps({"job": job}))
    aside.replace(folder.job)
    forget_supervisor(folder.root)  # which was this process
    message = f"submitted to {launcher.title} as job {job}"
    registry.results.add_event(run.id, spec.runner.launcher.kind, message, {"job": job})


def cancel_job(folder: RunFolder) -> None:
    """Cancels a run's job, pending or running; does nothing if the run has no job.

    Raises:
        EnvironmentFault: the job system is not installed here, does not answer, or refuses.
    """
    if (found := _find_job(folder)) is None:
        return
    launcher, job = found
    folder.job.unlink(missing_ok=True)  # first: the job's state must not count any more
    try:
        launcher.cancel(job)
    except EnvironmentFault:
        folder.job.write_text(json.dumps({"job": job}))
        raise


def _find_job(folder: RunFolder) -> tuple[JobLauncher, str] | None:
    """The latest job of a run with its launcher; None if its supervisor is no job."""
    job = read_job_id(folder)
    launcher = None if job is None else find_job_launcher(load_resolved_spec(folder).runner)
    return None if job is None or launcher is None else (launcher, job)


def leave_job(registry: Registry, run: RunRecord, folder: RunFolder) -> None:
    """Cancels the job of a run that goes on elsewhere. If its job system is gone, an event says so,
    and the job finds later that the run has another supervisor."""
    try:
        cancel_job(folder)
    except EnvironmentFault as fault:
        folder.job.unlink(missing_ok=True)
        message = f"the run's earlier job could not be cancelled: {fault}"
        registry.results.add_event(run.id, "warning", message, level="warning")


def reconcile_job(registry: Registry, run: RunRecord) -> RunRecord:
    """Updates a run from the state of its job, if the job could not record it itself.

    Args:
        registry: may be read-only; it is reopened for writing if there is something to record.
    """
    if run.directory is None or run.status not in ("queued", "running", "lost"):
        return run
    folder = RunFolder(Path(run.directory))
    found = _find_job(folder)
    if found is None or (change := found[0].find_status(found[1], run.status)) is None:
        return run
    status, reason = change
    try:
        with Registry.open(registry.url) as writing:
            if writing.transition(run.id, {run.status}, status, reason) and status != "queued":
                folder.reserve.unlink(missing_ok=True)
            return writing.run(run.id)
    except DatabaseUnwritableError:  # without write access, return the run as recorded
        return run


def list_startable_statuses(runner: RunnerSpec, run: RunRecord) -> set[Status]:
    """Statuses from which a supervisor may start its run.

    The job system may have restarted the job of a supervisor that it stopped, or that was killed
    with its machine.
    """
    launcher = find_job_launcher(runner)
    if launcher is None:
        return {"submitted"}
    if not launcher.count_restarts():
        return {"queued"}
    found: set[Status] = {"queued", "running", "lost"}
    if run.request is None and run.attempt:
        found.add("stopped")
    return found


def read_job_id(folder: RunFolder) -> str | None:
    """The id of a run's latest job; None if it has none."""
    try:
        return str(json.loads(folder.job.read_text())["job"])
    except FileNotFoundError:
        return None
