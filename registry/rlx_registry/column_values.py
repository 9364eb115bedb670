"""Values on their way into a database: text of any kind, and plain JSON."""

import json
from typing import Any

from sqlalchemy import Dialect, Text, TypeDecorator

__all__ = ["AnyText", "NotJsonError", "encode_plain_json"]


class AnyText(TypeDecorator[str]):
    """Text that may hold whatever a model or a scorer wrote.

    Sampled bytes may decode to lone surrogates, which no database can hold: they become escapes
    such as "\\ud800". PostgreSQL cannot hold NUL in text: it becomes its picture, "␀".
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
    """A value is not JSON. Drivers differ in whether they wrap it as an error of the statement."""


def encode_plain_json(value: object) -> str:
    """Returns a value as JSON text.

    Raises:
        NotPlain: something in it is not finite, or of a type that JSON does not have.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_unwrap_scalar, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise NotJsonError(str(error)) from error


def _unwrap_scalar(value: Any) -> object:
    """Unwraps NumPy scalars and one-element tensors; refuses everything else."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON; the registry stores plain values")
