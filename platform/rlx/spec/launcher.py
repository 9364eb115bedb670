"""What an experiment may say about the machines that its ranks run on."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rlx.spec.base import StrictModel

__all__ = ["HostsLauncherSpec", "LauncherSpec", "LocalLauncherSpec", "SlurmLauncherSpec"]

OURS = frozenset(
    {
        *("nodes", "ntasks", "ntasks-per-node", "array", "job-name", "comment", "chdir", "input"),
        *("output", "error", "open-mode", "export", "export-file", "parsable", "wrap", "wait"),
    }
)
"""Options of sbatch that rlx sets itself, or that would make something else than a run of a job."""


class LocalLauncherSpec(StrictModel):
    """Every rank on the machine of the supervisor."""

    kind: Literal["local"] = "local"


class HostsLauncherSpec(StrictModel):
    """Ranks on the machines of a hostfile, in its order; this machine is its first."""

    kind: Literal["hosts"] = "hosts"
    hostfile: str = Field(min_length=1)
    """DeepSpeed's own form: a line `NAME slots=N` per machine, `#` before what is not read."""
    # No tuple: behind `_by_kind` what was JSON is Python, whose lists are none to a strict model.
    ssh: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """More arguments of ssh, such as [-p, "2222"]."""


def _check_option_name(name: str) -> str:
    if name in OURS:
        raise ValueError(f"{name} is set by rlx")
    return name


OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$"), AfterValidator(_check_option_name)]


class SlurmLauncherSpec(StrictModel):
    """A job of its own for every run, with as many ranks on each of its nodes."""

    kind: Literal["slurm"] = "slurm"
    nodes: int = Field(1, ge=1)
    options: dict[OptionName, str | int | bool] = Field(default_factory=dict)
    """More options of sbatch, without dashes: `time: "12:00:00"`; true is one without a value."""


def _expand_launcher_kind(said: Any) -> Any:
    return {"kind": said} if isinstance(said, str) else said


_Kinds = Annotated[
    LocalLauncherSpec | HostsLauncherSpec | SlurmLauncherSpec, Field(discriminator="kind")
]

LauncherSpec = Annotated[
    _Kinds,
    BeforeValidator(
        _expand_launcher_kind, json_schema_input_type=Literal["local", "slurm"] | _Kinds
    ),
]
"""A kind alone is short for it and its defaults: `launcher: slurm`."""
