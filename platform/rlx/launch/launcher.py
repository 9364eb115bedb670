"""How the ranks of a run are started: one interface for every `runner.launcher`."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple, TypedDict

from rlx.discovery import import_implementation
from rlx.home import RunFolder
from rlx.launch.devices import query_nvidia_driver, torch_build
from rlx.launch.ports import find_free_port
from rlx.plugin import SamplerPlugin
from rlx.spec import ExperimentSpec, RunnerSpec
from rlx.spec.reading import Diagnostic
from rlx_registry import Status

__all__ = [
    "JobLauncher",
    "Launcher",
    "LocalLauncher",
    "MultiNodeLauncher",
    "NodeOrder",
    "NodeSession",
    "build_torchrun_command",
    "open_launcher",
]


class Launcher(ABC):
    """Starts the ranks of a run, on the supervisor's machine or on others.

    Attributes:
        runner: the section `runner`; `runner.launcher` holds the launcher's own settings.
        sampler: the section `sampler`; None where nobody asks what a run takes.
    """

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

    def count_runs_at_once(self) -> int:
        """Number of runs of a group that are started at the same time, unless the user says it.

        Raises:
            EnvironmentFault: `check` yields an error.
        """
        return 1

    @abstractmethod
    def build_command(self, folder: RunFolder, run_id: str) -> list[str]:
        """The command whose process starts all ranks of an attempt and ends with them."""


class LocalLauncher(Launcher):
    """Starts every rank on the supervisor's machine.

    Ranks that compute on the CPU are forks of a process that has imported their libraries. Those on
    GPUs are started by torchrun, a single one without it.
    """

    @property
    def is_on_cpu(self) -> bool:
        """Whether no rank will use a GPU: a process that has initialised CUDA cannot be forked."""
        if self.runner.device != "auto":
            return self.runner.device == "cpu"
        build = torch_build()
        if build is None or not (build.cuda or build.hip):
            return True
        return not build.hip and _has_no_nvidia_driver()

    def list_places(self) -> list[dict[str, str]]:
        """The environment variables that torchrun would set, for each rank started without it."""
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
        if self.runner.is_alone:
            return [sys.executable, "-m", "rlx.launch.rank", str(folder.root), run_id]
        return build_torchrun_command(["--standalone"], self.runner.ranks, folder.root, run_id)


def _has_no_nvidia_driver() -> bool:
    """Whether this machine certainly has no NVIDIA GPU that can be used."""
    driver = query_nvidia_driver()
    return driver is not None and driver.listing is None


class NodeOrder(TypedDict):
    """The ranks that one machine is to start.

    `node` is the machine's number and `address` the address of machine 0; both are None where
    Slurm provides them.
    """

    folder: str
    run_id: str
    cwd: str
    node: int | None
    nodes: int
    ranks: int
    address: str | None
    port: int
    environment: dict[str, str]


class NodeSession(NamedTuple):
    """A command that runs `rlx.launch.node` on one machine or on several, and the order that is
    sent to its standard input."""

    name: str
    command: list[str]
    order: NodeOrder


class MultiNodeLauncher(Launcher):
    """Starts ranks on several machines, each through a session that `rlx.launch.multi_node` keeps
    alive."""

    def build_command(self, folder: RunFolder, run_id: str) -> list[str]:
        return [sys.executable, "-m", "rlx.launch.multi_node", str(folder.root), run_id]

    @abstractmethod
    def list_sessions(self, order: NodeOrder, node: list[str]) -> Iterator[NodeSession]:
        """Yields the session of each machine.

        Args:
            order: what every machine receives, without the place of the machine.
            node: the command of `rlx.launch.node` on any of them.

        Raises:
            EnvironmentFault: the machines are not known.
        """


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
