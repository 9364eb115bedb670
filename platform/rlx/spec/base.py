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


def has_path(tree: Any, path: KeyPath) -> bool:
    """Whether plain values have one at a path."""
    absent = object()
    return get_at_path(tree, path, absent) is not absent


def set_at_path(tree: Any, name: str, value: Any) -> KeyPath:
    """Sets the value at `path.to.key`, and mappings on the way that are missing; returns the path.

    A number indexes a list. Keys that are there may contain dots. Below `phases.N.set`, the rest of
    the name is one key.

    Raises:
        ValueError: a list on the way has no such item, or a value has no keys.
    """
    parts, owner = name.split("."), tree
    path: KeyPath = ()
    while True:
        above, taken = ".".join(map(str, path)), 1
        key: str | int
        if isinstance(owner, list):
            if not parts[0].isdecimal() or int(parts[0]) >= len(owner):
                raise ValueError(f"there is no {name!r}: {above!r} is a list of {len(owner)}")
            key = int(parts[0])
        elif isinstance(owner, dict):
            if path[:1] == ("phases",) and path[2:] == ("set",):
                taken = len(parts)
            else:
                lengths = range(len(parts), 0, -1)
                taken = next((n for n in lengths if ".".join(parts[:n]) in owner), 1)
            key = ".".join(parts[:taken])
        else:
            raise ValueError(f"there is no {name!r}: {above!r} has no keys")
        path, parts = (*path, key), parts[taken:]
        if not parts:
            owner[key] = value
            return path
        if get_at_path(owner, (key,)) is None:
            owner[key] = {}
        owner = owner[key]


def list_yaml_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the YAML keys of a model."""
    return tuple(f.alias or name for name, f in model.model_fields.items())
