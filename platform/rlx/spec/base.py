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
        is_list = isinstance(step, int)
        if not isinstance(tree, list if is_list else dict):
            return default
        if step >= len(tree) if is_list else step not in tree:
            return default
        tree = tree[step]
    return tree


def list_yaml_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the YAML keys of a model."""
    return tuple(f.alias or name for name, f in model.model_fields.items())
