"""Base model, key paths and error types shared by all spec modules."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

__all__ = [
    "LARGEST",
    "Betas",
    "Contradiction",
    "Count",
    "FaultKind",
    "KeyPath",
    "SpecProblem",
    "StrictModel",
    "list_yaml_keys",
]


KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root of the file: `("phases", 0, "steps")`."""

FaultKind = Literal[
    "file", "syntax", "unknown_key", "missing_key", "value", "conflict", "plugin", "machine"
]


class StrictModel(BaseModel):
    """Frozen model that rejects unknown keys, so that a typo never becomes a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


LARGEST = 10**9
"""Largest count in an experiment. Sums and products of counts then fit the registry's columns and
the libraries' 64-bit integers."""

Count = Annotated[int, Field(le=LARGEST)]
"""A number of things, such as steps; a field adds its own lower bound."""

_Decay = Annotated[float, Field(ge=0, lt=1)]

Betas = tuple[_Decay, _Decay]
"""Adam's decay rates for the first and second moments."""


@dataclass(frozen=True, slots=True)
class SpecProblem:
    """One key that conflicts with the rest of the spec.

    Attributes:
        path: the key.
        message: a sentence that names the key, without a final full stop.
        choices: valid names for the value, if there is a short list of them.
        help: what to do if no choice is close to the value.
        against: the key it conflicts with; located instead of `path` if the file lacks `path`.
        kind: category of the fault; determines the order in a report.
        cause: validation error of a phase's own spec, if `path` is a phase.
        data: the values that this spec was validated from.
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
    """Values that are valid on their own but contradict each other; holds every problem found."""

    def __init__(self, *problems: SpecProblem) -> None:
        self.problems = problems
        super().__init__("; ".join(problem.message for problem in problems))


def list_yaml_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the YAML keys of a model."""
    return tuple(f.alias or name for name, f in model.model_fields.items())
