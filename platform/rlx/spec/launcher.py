"""The `runner.launcher` section (entry-point group `rlx.launchers`): where the ranks run."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from rlx.plugin import LauncherPlugin, PluginSection
from rlx.spec.base import Count, StrictModel

__all__ = [
    "LAUNCHERS",
    "LauncherSpec",
    "LocalLauncherSpec",
    "RayLauncherSpec",
    "ScorersSpec",
    "SlurmLauncherSpec",
]

OURS = frozenset(
    {
        *("nodes", "ntasks", "ntasks-per-node", "array", "job-name", "comment", "chdir", "input"),
        *("output", "error", "open-mode", "export", "export-file", "parsable", "wrap", "wait"),
    }
)
"""sbatch options that rlx sets itself, or that would make a job something other than one run."""


class LocalLauncherSpec(LauncherPlugin):
    """Runs every rank on the supervisor's machine."""

    implementation: ClassVar[str] = "rlx.launch:LocalLauncher"

    kind: Literal["local"] = "local"


def _check_option_name(name: str) -> str:
    if name in OURS:
        raise ValueError(f"{name} is set by rlx")
    return name


OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$"), AfterValidator(_check_option_name)]


class SlurmLauncherSpec(LauncherPlugin):
    """Runs each experiment as its own Slurm job, with the same number of ranks on every node."""

    implementation: ClassVar[str] = "rlx.launch:SlurmLauncher"
    submits_jobs: ClassVar[bool] = True

    kind: Literal["slurm"] = "slurm"
    nodes: Count = Field(1, ge=1)
    options: dict[OptionName, str | int | bool] = Field(default_factory=dict)
    """Additional sbatch options, without dashes: `time: "12:00:00"`; true sets a flag without a
    value."""

    def check_ranks(self, ranks: int) -> None:
        if ranks % self.nodes:
            raise ValueError(
                f"launcher.nodes {self.nodes} does not divide ranks {ranks}: every node needs the "
                "same number"
            )


def _check_whole_above_one(amount: float) -> float:
    if amount > 1 and amount != int(amount):
        raise ValueError("Ray takes whole numbers above 1")
    return amount


RayAddress = Annotated[
    str,
    Field(pattern=r"^(local|auto|[A-Za-z0-9.-]+:\d{1,5}|https?://[A-Za-z0-9.:\[\]-]+(/[^\s@]*)?)$"),
]
ResourceName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$")]
ResourceAmount = Annotated[float, Field(gt=0), AfterValidator(_check_whole_above_one)]


class ScorersSpec(StrictModel):
    """Actors that run rewards and environments for all ranks, in place of each rank's own scoring
    processes."""

    count: Count = Field(ge=1)
    resources: dict[ResourceName, ResourceAmount] = Field(default_factory=dict)
    """What each takes, by Ray's names; CPU is `runner.reward_workers`, the number of its scoring
    processes, unless it is given here."""


class RayLauncherSpec(LauncherPlugin):
    """Runs every rank as an actor of a Ray cluster, which places it by the resources it takes."""

    implementation: ClassVar[str] = "rlx.launch:open_ray_launcher"

    kind: Literal["ray"] = "ray"
    address: RayAddress = "local"
    """local: a cluster of the run's own on this machine. auto: the one that this machine belongs
    to. HOST:PORT: the same, by the address of its head. http://HOST:PORT: Ray Jobs of any cluster,
    where each run becomes a job."""
    resources: dict[ResourceName, ResourceAmount] = Field(default_factory=dict)
    """What each rank takes, by Ray's names: {CPU: 4, "accelerator_type:A100": 0.001}. CPU is
    `runner.threads` and GPU what the device and the sampler need, unless they are given here."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Where all of these are placed: PACK fills nodes, SPREAD prefers different ones; the
    strict ones demand it."""
    scorers: ScorersSpec | None = None
    """null: each rank has scoring processes of its own, on its node."""
    server_resources: dict[ResourceName, ResourceAmount] = Field(default_factory=dict)
    """What each server of `sampler.pool` takes. GPU is `sampler.pool.tensor_parallel` and CPU 1, or
    without GPUs `runner.threads` for each device, unless they are given here."""
    job_resources: dict[ResourceName, ResourceAmount] = Field(default_factory=dict)
    """With an address of Ray Jobs: what the supervisor's job takes, and so on which nodes it may
    be; without, it is on the head's."""
    grows: bool = False
    """The cluster adds nodes on demand, so a run that its present nodes cannot hold waits."""

    @property
    def submits_jobs(self) -> bool:  # type: ignore[override]
        """Whether the address is one of Ray Jobs."""
        return self.address.startswith(("http://", "https://"))

    def check_ranks(self, ranks: int) -> None:
        places = ranks + (self.scorers.count if self.scorers else 0)
        if self.address == "local" and self.strategy == "STRICT_SPREAD" and places > 1:
            raise ValueError(
                "launcher.strategy STRICT_SPREAD needs several nodes, and a cluster "
                "with launcher.address local has one"
            )
        if self.job_resources and not self.submits_jobs:
            raise ValueError(
                "launcher.job_resources needs a launcher.address of Ray Jobs, http://HOST:PORT"
            )


LAUNCHERS: Final = PluginSection(
    base=LauncherPlugin,
    group="rlx.launchers",
    kind="launcher",
    key="kind",
    shipped={
        "local": LocalLauncherSpec,
        "ray": RayLauncherSpec,
        "slurm": SlurmLauncherSpec,
    },
    allows_name=True,
)

LauncherSpec = Annotated[LauncherPlugin, LAUNCHERS]
"""A bare kind stands for its defaults: `launcher: slurm`."""
