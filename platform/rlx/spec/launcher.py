"""The `runner.launcher` section (entry-point group `rlx.launchers`): where the ranks run."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from rlx.plugin import LauncherPlugin, PluginSection
from rlx.spec.base import Count

__all__ = [
    "LAUNCHERS",
    "LauncherSpec",
    "LocalLauncherSpec",
    "RayLauncherSpec",
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


RayAddress = Annotated[str, Field(pattern=r"^(auto|[A-Za-z0-9.-]+:\d{1,5})$")]
ResourceName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$")]
ResourceAmount = Annotated[float, Field(gt=0), AfterValidator(_check_whole_above_one)]


class RayLauncherSpec(LauncherPlugin):
    """Runs every rank as an actor of a Ray cluster, whose nodes share RLX_HOME and reach the
    registry."""

    implementation: ClassVar[str] = "rlx.launch:RayLauncher"

    kind: Literal["ray"] = "ray"
    address: RayAddress = "auto"
    """auto: the cluster that this machine belongs to. HOST:PORT: the one with this head."""
    resources: dict[ResourceName, ResourceAmount] = Field(default_factory=dict)
    """What each rank takes, by Ray's names: {CPU: 4, "accelerator_type:A100": 0.001}. CPU is
    `runner.threads` and GPU what the device and the sampler need, unless they are given here."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Where all of these are placed: PACK fills nodes, SPREAD prefers different ones; the
    strict ones demand it."""


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
