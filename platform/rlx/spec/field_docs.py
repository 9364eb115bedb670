"""Reads the docstrings below the fields of a model from its source, on demand."""

import ast
import inspect
import textwrap
from itertools import pairwise

from pydantic import BaseModel

__all__ = ["read_field_meanings"]


def read_field_meanings(model: type[BaseModel]) -> dict[str, str]:
    """Returns the docstring below each field, by field name; empty for a model without source.

    Pydantic's `use_attribute_docstrings` would read the source at every import.
    """
    meanings: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        for field, below in pairwise(_parse_class_body(cls)):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                meaning = _get_docstring_text(below)
                if meaning is not None:
                    meanings[field.target.id] = " ".join(meaning.split())
    return meanings


def _parse_class_body(cls: type) -> list[ast.stmt]:
    """Returns the statements of a model's class body; empty if its source is unavailable."""
    if not issubclass(cls, BaseModel) or cls is BaseModel:
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # created dynamically, so there is no source to read
        return []
    return tree[0].body if tree and isinstance(tree[0], ast.ClassDef) else []


def _get_docstring_text(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        value = node.value.value
        return value if isinstance(value, str) else None
    return None
