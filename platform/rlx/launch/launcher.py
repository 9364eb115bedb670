"""How the ranks of a run are started: one interface for every `runner.launcher`."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from rlx.discovery import import_implementation
from rlx.home import RunFolder
from rlx.launch.ports import find_free_port
from rlx.plugin import SamplerPlugin
from rlx.spec import ExperimentSpec, RunnerSpec
from rlx.spec.reading import Diagnostic
from rlx_registry import Status

__all__ = [
    "JobLauncher",
    "Launcher",
    "LocalLauncher",
    "build_torchrun_command",
    "open_launcher",
]


class Launcher(ABC):
    """Starts the ranks of a run, on the supervisor's machine or on others.

    Attributes:
        runner: the section `runner`; `runner.launcher` holds the launcher's own settings.
        sampler: the section `sampler`; None where nobody asks what a run takes.
        reads_input: whether the process of its command reads its standard input as
            `rlx.launch.rank_processes` says; others are asked to stop by SIGTERM.
    """

    reads_input: ClassVar[bool] = False

    def __init__(self, runner: RunnerSpec, sampler: SamplerPlugin | None = None) -> None:
        self.runner, self.sampler = runner, sampler

    def check(self) -> Iterator[Diagnostic]:
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
        """The environment variables of torch.distributed, for each rank."""
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
        """The command of each rank."""
        return [sys.executable, "-m", "rlx.launch.rank", str(folder.root), run_id]


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


def open_launcher(runner: RunnerSpec, sampler: SamplerPlugin | None = None) -> Launcher:
    """Returns the launcher that the section `runner` names.

    Args:
        sampler: the section `sampler`, if somebody will ask what the run takes.

    Raises:
        PluginError: its implementation cannot be imported.
    """
    launcher: Launcher = import_implementation(runner.launcher.implementation)(runner, sampler)
    return launcher


def build_torchrun_command(
    place: Iterable[str], ranks: int, folder: Path, run_id: str
) -> list[str]:
    """The torchrun command for one machine's ranks; `place` holds its rendezvous options."""
    command = [sys.executable, "-m", "torch.distributed.run", *place]
    return [*command, f"--nproc-per-node={ranks}", "-m", "rlx.launch.rank", str(folder), run_id]
