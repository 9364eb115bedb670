"""Describes the values of an experiment in messages, and suggests how to mend them."""

import re
from collections.abc import Sequence
from typing import Any

from rlx.spec.base import LARGEST, KeyPath, list_yaml_keys
from rlx.spec.reading.diagnostics import did_you_mean

__all__ = ["SELECTORS", "describe_value", "suggest_fixes", "suggest_section"]

SELECTORS = frozenset({"engine", "kind", "name", "plugin", "strategy", "type"})
"""Keys that select what their section is."""

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?")
_WORD = re.compile(r"[\w-]+")


def describe_value(value: Any) -> str:
    """Describes a value for an error message: `text 'x'`, `3`, `a list`."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"text {_shorten_value_text(value)!r}"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    return _shorten_value_text(str(value))


def _shorten_value_text(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def suggest_fixes(value: Any, names: Sequence[str], kind: str) -> tuple[str, ...]:
    """Suggests how to mend a value that is not of the expected kind.

    Args:
        value: as written.
        names: names that are allowed instead.
        kind: Pydantic's type of the error.
    """
    if value is None:
        return ("give it a value, or drop the key",)
    if isinstance(value, str) and (near := did_you_mean(value, names)):
        return (f"did you mean '{near}'?",)
    if isinstance(value, str) and value.startswith("${"):
        return ("values are not taken from the environment: use --set",)
    if isinstance(value, str) and kind.startswith(("int_", "float_")) and _NUMBER.fullmatch(value):
        return (f"write it without quotes: {value}",)
    if isinstance(value, str) and kind.startswith(("tuple_", "list_")):
        parts = [part.strip() for part in value.split(",")]
        written = (part if _WORD.fullmatch(part) else repr(part) for part in parts)
        return (f"write it as a list: [{', '.join(written)}]",)
    if kind.startswith("int_") and isinstance(value, float) and value.is_integer():
        if abs(value) > LARGEST:
            return (f"write it in digits; counts are at most {LARGEST}",)
        return (f"write {int(value)}",)
    if kind.startswith("string_") and isinstance(value, int | float) and value is not None:
        return (f'put it in quotes: "{describe_value(value)}"',)
    if kind.startswith("bool_") and str(value).lower() in ("yes", "no", "on", "off", "0", "1"):
        return ("only true and false are booleans in YAML 1.2",)
    return ()


def suggest_section(path: KeyPath, section: Any, value: str) -> tuple[str, ...]:
    """Suggests the section that a bare name was meant to be, such as `estimator: {name: grpo}`."""
    known = list_yaml_keys(section) if isinstance(section, type) else ()
    selectors = [key for key in known if key in SELECTORS]
    if len(selectors) != 1:
        return ()
    return (f"write it as `{path[-1]}: {{{selectors[0]}: {_shorten_value_text(value)}}}`",)
