"""Reads an experiment and its overrides, and records where each value comes from."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rlx.spec.base import KeyPath
from rlx.spec.experiment import ExperimentSpec
from rlx.spec.reading.diagnostics import (
    Diagnostic,
    InvalidSpec,
    SourceLocation,
    build_refusal,
    format_key_path,
)
from rlx.spec.reading.extends import read_extended_document
from rlx.spec.reading.yaml_source import YamlDocument, parse_yaml_document

__all__ = ["LoadedSpec", "apply_overrides", "list_leaf_values", "read_document"]

_OVERRIDE = "<override>"


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """An experiment with the origin of each value.

    Attributes:
        path: the file.
        yaml: text of the file and of those that it extends, without the overrides.
        spec: the spec, with the overrides.
        origins: maps the dotted path of every value to `default`, `FILE:line` or `--set`;
            a list of plain values counts as one value.
        paths: maps the same dotted paths to key paths, since a key may contain dots.
        document: values and source locations as written.
    """

    path: Path
    yaml: str
    spec: ExperimentSpec
    origins: Mapping[str, str]
    paths: Mapping[str, KeyPath]
    document: YamlDocument

    @classmethod
    def from_document(cls, path: Path, document: YamlDocument, spec: ExperimentSpec) -> Self:
        """Returns the experiment `spec` that was validated from `document`."""
        paths = {format_key_path(at): at for at in _list_leaf_paths(spec.dump_resolved(), ())}
        origins = {name: _describe_origin(at, document) for name, at in paths.items()}
        return cls(path, document.whole_text, spec, origins, paths, document)


def read_document(path: Path, overrides: Sequence[str] = ()) -> YamlDocument:
    """Parses a file and those that it extends, and applies the overrides, without validation.

    Raises:
        InvalidSpec: a file is not YAML that rlx accepts, or is a suite, or an override cannot be
            applied.
        SpecError: the file cannot be opened.
    """
    document = read_extended_document(path)
    keys = document.tree.keys() if isinstance(document.tree, dict) else set()
    if "sets" in keys and not {"task", "rollout", "rewards"} & keys:
        raise build_refusal([_build_suite_fault(document)], document.file)
    return apply_overrides(document, overrides)


def _build_suite_fault(document: YamlDocument) -> Diagnostic:
    return Diagnostic(
        kind="syntax",
        message="this is a suite of held-out sets, not an experiment",
        position=document.keys["sets",],
        helps=(f"evaluate a run with it: rlx eval RUN --suite {document.file}",),
    )


def apply_overrides(document: YamlDocument, overrides: Sequence[str]) -> YamlDocument:
    """Applies `path.to.key=value` overrides to a document, in order.

    Values are parsed like the file. A number indexes a list. Missing mappings are created. Below
    `phases.N.set` the rest of the path is one key.

    Raises:
        InvalidSpec: an override cannot be parsed, or its path goes through a value without keys.
    """
    faults: list[Diagnostic] = []
    for number, text in enumerate(overrides, 1):
        try:
            document = _apply_override(document, number, text)
        except InvalidSpec as error:
            faults += error.diagnostics
    if faults:
        raise build_refusal(faults, document.file)
    return document


def _apply_override(document: YamlDocument, number: int, text: str) -> YamlDocument:
    name, equals, value = text.partition("=")
    if not equals or not all(name.split(".")):
        message = "write an override as path.to.key=value"
        raise _build_override_refusal(message, number, text, 0, len(text))
    path = tuple(_split_override_path(document.tree, name, number, text))
    tree = deepcopy(document.tree)
    keys, values = (
        {at: place for at, place in places.items() if at[: len(path)] != path}
        for places in (document.keys, document.values)
    )
    node = tree
    start = 0
    for depth, step in enumerate(path):
        width = len(str(step))
        at = path[: depth + 1]
        mine = _build_override_position(number, text, start, width)
        if not isinstance(step, int):
            keys[at] = keys.get(at, mine)
        values[at] = values.get(at, mine)
        start += width + 1
        if depth < len(path) - 1:
            if isinstance(node, dict) and node.get(step) is None:
                node[step] = {}
            node = node[step]
    written = _parse_override_value(value, number, text, start)
    node[path[-1]] = written.tree
    keys |= {(*path, *at): place for at, place in written.keys.items()}
    values |= {(*path, *at): place for at, place in written.values.items()}
    return replace(document, tree=tree, keys=keys, values=values)


def _split_override_path(tree: Any, name: str, number: int, text: str) -> Iterator[str | int]:
    """Splits a dotted path along the existing values, since keys may contain dots."""
    parts = name.split(".")
    done: KeyPath = ()
    node = tree
    while parts:
        step: str | int = parts[0]
        taken = 1
        if done[:1] == ("phases",) and done[2:] == ("set",):
            taken = len(parts)
            step = ".".join(parts)
        elif isinstance(node, list):
            if not parts[0].isdecimal() or int(parts[0]) >= len(node):
                message = (
                    f"'{format_key_path(done)}' is a list of {len(node)}: no item {parts[0]!r}"
                )
                raise _build_override_refusal(message, number, text, 0, len(name))
            step = int(parts[0])
        elif isinstance(node, dict):
            lengths = range(len(parts), 0, -1)
            taken = next((n for n in lengths if ".".join(parts[:n]) in node), 1)
            step = ".".join(parts[:taken])
        elif node is not None:
            message = f"'{format_key_path(done)}' has no keys"
            raise _build_override_refusal(message, number, text, 0, len(name))
        yield step
        done = (*done, step)
        node = node[step] if isinstance(step, int) else (node or {}).get(step)
        parts = parts[taken:]


def _parse_override_value(value: str, number: int, text: str, start: int) -> YamlDocument:
    """Parses an override's value; its source locations are relative to the whole override."""

    def move_position(place: SourceLocation) -> SourceLocation:
        column = place.column + start if place.line == 1 else place.column
        line = text.splitlines()[0] if place.line == 1 else place.text
        return replace(place, line=number, column=column, text=line)

    try:
        read = parse_yaml_document(value, _OVERRIDE)
    except InvalidSpec as error:
        faults = [
            replace(d, path=(), position=d.position and move_position(d.position))
            for d in error.diagnostics
        ]
        raise build_refusal(faults, _OVERRIDE) from None
    return replace(
        read,
        keys={at: move_position(place) for at, place in read.keys.items()},
        values={at: move_position(place) for at, place in read.values.items()}
        or {(): _build_override_position(number, text, 0, len(text))},
    )


def _build_override_position(number: int, text: str, start: int, width: int) -> SourceLocation:
    return SourceLocation(_OVERRIDE, number, start + 1, max(1, width), text)


def _build_override_refusal(
    message: str, number: int, text: str, start: int, width: int
) -> InvalidSpec:
    position = _build_override_position(number, text, start, width)
    return build_refusal([Diagnostic(kind="syntax", message=message, position=position)], _OVERRIDE)


def list_leaf_values(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields every value of an experiment with its dotted path; a list of plain values is one."""
    for path in _list_leaf_paths(tree, ()):
        node = tree
        for step in path:
            node = node[step]
        yield format_key_path(path), node


def _list_leaf_paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _list_leaf_paths(below, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _list_leaf_paths(item, (*path, index))
    else:
        yield path


def _get_written_value(document: YamlDocument, path: KeyPath) -> Any:
    """Returns the value at `path` as written in the file, or None if the file omits it."""
    node = document.tree
    for step in path:
        node = node.get(step) if isinstance(node, dict) else None
    return node


def _describe_origin(path: KeyPath, document: YamlDocument) -> str:
    place = document.values.get(path)
    if (
        place is None
        and path[-1] == "kind"
        and isinstance(_get_written_value(document, path[:-1]), str)
    ):
        place = document.values.get(path[:-1])  # a bare kind, such as `launcher: slurm`
    if place is None:
        return "default"
    return "--set" if place.file == _OVERRIDE else f"{place.file}:{place.line}"
