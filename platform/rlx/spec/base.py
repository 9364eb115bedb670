"""What every piece of the spec has in common."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

__all__ = [
    "Betas",
    "Contradiction",
    "FaultKind",
    "KeyPath",
    "SpecProblem",
    "StrictModel",
    "list_yaml_keys",
]


KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of the file: `("phases", 0, "steps")`."""

FaultKind = Literal[
    "file", "syntax", "unknown_key", "missing_key", "value", "conflict", "plugin", "machine"
]


class StrictModel(BaseModel):
    """Frozen, and strict about keys: a typo is an error and never a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


_Decay = Annotated[float, Field(ge=0, lt=1)]

Betas = tuple[_Decay, _Decay]
"""Adam's decay rates of the first and the second moment."""


@dataclass(frozen=True, slots=True)
class SpecProblem:
    """One key that does not fit the rest of the spec.

    Attributes:
        path: the key.
        message: a sentence that names it, without a final full stop.
        choices: what could have stood there instead, where that is a short list of names.
        help: what to do, where no choice is near.
        against: the key that it does not fit; stands for `path` where the file does not have that.
        kind: decides the order in a report.
        cause: the failure of a phase's own spec, when `path` is a phase.
        data: what that spec was made from.
    """

    path: KeyPath
    message: str
    choices: tuple[str, ...] = ()
    help: str = ""
    against: KeyPath = ()
    kind: FaultKind = "conflict"
    cause: ValidationError | None = None
    data: Any = None


class Contradiction(ValueError):
    """Values that are each well-formed and cannot stand together: all that were found."""

    def __init__(self, *problems: SpecProblem) -> None:
        self.problems = problems
        super().__init__("; ".join(problem.message for problem in problems))


def list_yaml_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Keys that YAML may give a model."""
    return tuple(f.alias or name for name, f in model.model_fields.items())
