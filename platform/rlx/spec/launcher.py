"""The `runner.launcher` section: which machines the ranks run on."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rlx.spec.base import Count, StrictModel

__all__ = ["HostsLauncherSpec", "LauncherSpec", "LocalLauncherSpec", "SlurmLauncherSpec"]

OURS = frozenset(
    {
        *("nodes", "ntasks", "ntasks-per-node", "array", "job-name", "comment", "chdir", "input"),
        *("output", "error", "open-mode", "export", "export-file", "parsable", "wrap", "wait"),
    }
)
"""sbatch options that rlx sets itself, or that would make a job something other than one run."""


class LocalLauncherSpec(StrictModel):
    """Runs every rank on the supervisor's machine."""

    kind: Literal["local"] = "local"


class HostsLauncherSpec(StrictModel):
    """Runs ranks on the machines of a hostfile, in order; the first must be this machine."""

    kind: Literal["hosts"] = "hosts"
    hostfile: str = Field(min_length=1)
    """Path of a hostfile in DeepSpeed's format: one line `NAME slots=N` per machine, `#` starts a
    comment."""
    # Not a tuple: after `_expand_launcher_kind` the data is Python, not JSON, and strict validation
    # does not accept a list for a tuple.
    ssh: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Additional ssh arguments, such as [-p, "2222"]."""


def _check_option_name(name: str) -> str:
    if name in OURS:
        raise ValueError(f"{name} is set by rlx")
    return name


OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$"), AfterValidator(_check_option_name)]


class SlurmLauncherSpec(StrictModel):
    """Runs each experiment as its own Slurm job, with the same number of ranks on every node."""

    kind: Literal["slurm"] = "slurm"
    nodes: Count = Field(1, ge=1)
    options: dict[OptionName, str | int | bool] = Field(default_factory=dict)
    """Additional sbatch options, without dashes: `time: "12:00:00"`; true sets a flag without a
    value."""


def _expand_launcher_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


_Kinds = Annotated[
    LocalLauncherSpec | HostsLauncherSpec | SlurmLauncherSpec, Field(discriminator="kind")
]

LauncherSpec = Annotated[
    _Kinds,
    BeforeValidator(
        _expand_launcher_kind, json_schema_input_type=Literal["local", "slurm"] | _Kinds
    ),
]
"""A bare kind stands for its defaults: `launcher: slurm`."""
