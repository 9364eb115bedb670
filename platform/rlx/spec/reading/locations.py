"""Locates diagnostics in a file, or in the `set` of a phase."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlx.spec.base import KeyPath
from rlx.spec.reading.diagnostics import Diagnostic, SourceLocation, format_key_path
from rlx.spec.reading.yaml_source import YamlDocument
from rlx.text import escape_unprintable

__all__ = ["locate_diagnostic", "relocate_phase_fault"]


def locate_diagnostic(diagnostic: Diagnostic, document: YamlDocument) -> Diagnostic:
    """Returns the diagnostic with its location in the file; None if the file has no such key."""
    path = diagnostic.path
    if path not in document.values and diagnostic.against:
        path = diagnostic.against if diagnostic.against in document.values else path
    position = document.locate(path, key=diagnostic.kind == "unknown_key")
    position = diagnostic.position or position
    helps = diagnostic.helps
    is_of_base = position is not None and position.file in dict(document.bases)
    if is_of_base and diagnostic.kind == "unknown_key" and not diagnostic.meant:
        name = format_key_path(path)
        helps += (f"null for '{name}' in {escape_unprintable(document.file)} leaves it out",)
    if position is not None and diagnostic.kind == "value" and _is_bare_tilde(position):
        helps = ("in YAML, ~ is null: put a path in quotes, such as '~/models/mine'",)
    return replace(diagnostic, position=position, helps=helps)


def _is_bare_tilde(position: SourceLocation) -> bool:
    start = position.column - 1
    return position.text[start : start + position.width] == "~"


def relocate_phase_fault(fault: Diagnostic, path: KeyPath, phase: Mapping[str, Any]) -> Diagnostic:
    """Moves a fault of a phase's own spec to the entry of the phase's `set` that causes it.

    Args:
        fault: located in the phase's spec.
        path: path of the phase.
        phase: the phase as written.
    """
    settings = phase.get("set") or {}
    name = phase.get("name")
    where = _find_phase_setting(fault.path, settings) or _find_phase_setting(
        fault.against, settings
    )
    named = f"phase '{name}'" in fault.message
    message = fault.message if named else f"{fault.message} (phase '{name}')"
    return replace(fault, path=(*path, *where), against=(), meant="", message=message)


def _find_phase_setting(path: KeyPath, settings: Mapping[str, Any]) -> KeyPath:
    """Returns the `set` entry that shares the longest prefix with `path`; empty if none does."""

    def count_shared_keys(key: str) -> int:
        count = 0
        for mine, theirs in zip(key.split("."), map(str, path), strict=False):
            if mine != theirs:
                break
            count += 1
        return count

    best = max(settings, key=count_shared_keys, default="")
    return ("set", best) if best and count_shared_keys(best) else ()
