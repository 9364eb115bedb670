"""Conversion of values for the database: arbitrary text, folders of runs, and plain JSON."""

import json
from pathlib import Path
from typing import Any

from sqlalchemy import Dialect, Engine, Text, TypeDecorator

from rlx_registry.errors import RegistryDatabaseError


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


class FolderPath(TypeDecorator[str]):
    """The absolute path of a folder, stored relative to the base folder of the database if it lies
    below it, so that both can be moved and copied together.

    Earlier versions stored every path as absolute. Of such a path, the last two parts are looked
    for below the base: a home that was moved or copied owns the folders in it.
    """

    impl = AnyText
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        base = _get_base_folder(dialect)
        if value is None or base is None or not Path(value).is_relative_to(base):
            return value
        return Path(value).relative_to(base).as_posix()

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        base = _get_base_folder(dialect)
        if value is None or base is None:
            return value
        recorded = base / value  # an absolute path replaces the base
        if recorded.is_relative_to(base):
            return str(recorded)
        own = base.joinpath(*recorded.parts[-2:])
        return str(own if own.is_dir() else recorded)


def set_base_folder(engine: Engine, base: Path) -> None:
    """Sets the folder that paths in an engine's database are relative to."""
    engine.dialect.rlx_base_folder = base  # type: ignore[attr-defined]


def _get_base_folder(dialect: Dialect) -> Path | None:
    return getattr(dialect, "rlx_base_folder", None)


class NotJsonError(ValueError):
    """A value is not JSON. Only some drivers wrap this error as a statement error."""


def encode_plain_json(value: object) -> str:
    """Returns a value as JSON text, or raises NotJsonError, as for a non-finite number."""
    try:
        return json.dumps(value, allow_nan=False, default=_unwrap_scalar, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise NotJsonError(str(error)) from error


def decode_stored_json(stored: str) -> object:
    """Returns a value that `encode_plain_json` wrote."""
    try:
        return json.loads(stored)
    except ValueError as error:
        raise RegistryDatabaseError(
            f"the registry is damaged: a stored value is not JSON ({error}); restore a backup of it"
        ) from error


def _unwrap_scalar(value: Any) -> object:
    """Unwraps NumPy scalars and one-element tensors."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON; the registry stores plain values")
