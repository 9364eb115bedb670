"""Conversion of values for the database: arbitrary text, and plain JSON."""

import json
from typing import Any

from sqlalchemy import Dialect, Text, TypeDecorator

from rlx_registry.errors import RegistryDatabaseError

__all__ = ["AnyText", "NotJsonError", "decode_stored_json", "encode_plain_json"]


class AnyText(TypeDecorator[str]):
    """A text column for anything that a model or a scorer wrote.

    Sampled bytes may decode to lone surrogates, which no database can store: they become escapes
    such as "\\ud800". PostgreSQL cannot store NUL in text: it becomes the symbol "␀".
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        if not value.isascii():
            value = value.encode("utf-8", "backslashreplace").decode()
        return value.replace("\0", "␀") if dialect.name == "postgresql" else value


class NotJsonError(ValueError):
    """A value is not JSON. Only some drivers wrap this error as a statement error."""


def encode_plain_json(value: object) -> str:
    """Returns a value as JSON text.

    Raises:
        NotJsonError: it contains a non-finite number, or a type that JSON does not have.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_unwrap_scalar, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise NotJsonError(str(error)) from error


def decode_stored_json(stored: str) -> object:
    """Returns a value that `encode_plain_json` wrote.

    Raises:
        RegistryDatabaseError: it is not JSON any more.
    """
    try:
        return json.loads(stored)
    except ValueError as error:
        raise RegistryDatabaseError(
            f"the registry is damaged: a stored value is not JSON ({error}); `rlx db import` "
            "restores runs from their folders into a new registry"
        ) from error


def _unwrap_scalar(value: Any) -> object:
    """Unwraps NumPy scalars and one-element tensors; raises TypeError for everything else."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON; the registry stores plain values")
