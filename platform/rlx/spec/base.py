"""What every piece of the spec has in common."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlx.spec.diagnostic import KeyPath

__all__ = ["Contradiction", "Problem", "Strict"]


class Strict(BaseModel):
    """Frozen, and strict about keys: a typo is an error and never a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


@dataclass(frozen=True, slots=True)
class Problem:
    """One key that does not fit the rest of the spec.

    Attributes:
        path: the key.
        message: a sentence that names it, without a final full stop.
        choices: what could have stood there instead, where that is a short list of names.
        cause: the failure of a phase's own spec, when `path` is a phase.
        data: what that spec was made from.
    """

    path: KeyPath
    message: str
    choices: tuple[str, ...] = ()
    cause: ValueError | None = None
    data: Any = None


class Contradiction(ValueError):
    """Values that are each well-formed and cannot stand together: all that were found."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("; ".join(problem.message for problem in problems))
