"""What the source says below the fields of a model, read only where somebody wants to know."""

import ast
import inspect
import textwrap
from itertools import pairwise

from pydantic import BaseModel

__all__ = ["read_field_meanings"]


def read_field_meanings(model: type[BaseModel]) -> dict[str, str]:
    """The text below each field, by field; nothing for a model that has no source of its own.

    Pydantic's `use_attribute_docstrings` would read it at every import.
    """
    said: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        for field, below in pairwise(_parse_class_body(cls)):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                meaning = _get_docstring_text(below)
                if meaning is not None:
                    said[field.target.id] = " ".join(meaning.split())
    return said


def _parse_class_body(cls: type) -> list[ast.stmt]:
    """The statements of a model's class, as far as it is written in a file."""
    if not issubclass(cls, BaseModel) or cls is BaseModel:
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # made by a function, which leaves no class to read
        return []
    return tree[0].body if tree and isinstance(tree[0], ast.ClassDef) else []


def _get_docstring_text(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        value = node.value.value
        return value if isinstance(value, str) else None
    return None
