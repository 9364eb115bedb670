"""Base model and key paths shared by all spec modules."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from rlx.plugin import LARGEST as LARGEST

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root of the file: `("phases", 0, "steps")`."""

FaultKind = Literal[
    "file", "syntax", "unknown_key", "missing_key", "value", "conflict", "plugin", "machine"
]

_Decay = Annotated[float, Field(ge=0, lt=1)]

Betas = tuple[_Decay, _Decay]
"""Adam's decay rates for the first and second moments."""


def get_at_path(tree: Any, path: KeyPath, default: Any = None) -> Any:
    """Returns the value at a path of plain values, or `default` if there is none."""
    for step in path:
        if isinstance(step, int):
            is_there = isinstance(tree, list) and step < len(tree)
        else:
            is_there = isinstance(tree, dict) and step in tree
        if not is_there:
            return default
        tree = tree[step]
    return tree


def list_yaml_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the YAML keys of a model."""
    return tuple(f.alias or name for name, f in model.model_fields.items())
