"""Base model and key paths shared by all spec modules."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "LARGEST",
    "Betas",
    "Count",
    "FaultKind",
    "KeyPath",
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


def list_yaml_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the YAML keys of a model."""
    return tuple(f.alias or name for name, f in model.model_fields.items())
