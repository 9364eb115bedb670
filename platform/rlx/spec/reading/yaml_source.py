"""Parses YAML into plain values, and the location of each in the source.

It implements the YAML 1.2 core schema: `1e-5` is a number, `no` is text, `12:30` is text. Features
that experiments do not need and that cause mistakes are rejected: duplicate keys, tags, anchors,
several documents.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlx.errors import SpecError
from rlx.spec.base import KeyPath, get_at_path
from rlx.spec.reading.diagnostics import (
    Diagnostic,
    InvalidSpec,
    SourceLocation,
    build_error,
    build_refusal,
    format_key_path,
)
from rlx.spec.training import PhaseSpec
from rlx.text import escape_unprintable

MAX_BYTES = 262_144
MAX_DEPTH = 32
OVERRIDE = "<override>"
"""Name of the source of all overrides."""
_MAX_DIGITS = 400
_TYPOGRAPHIC = re.compile("[\u2018-\u201f\u00ab\u00bb].*[\u2018-\u201f\u00ab\u00bb]", re.DOTALL)
"""A text between the quotes of a word processor."""
_BREAKS = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # line breaks according to YAML


class Place(NamedTuple):
    """Where a value is, and its key, which the whole document and items of lists lack."""

    value: SourceLocation
    key: SourceLocation | None = None


@dataclass(frozen=True)
class YamlDocument:
    """The values of one source, with those that overrides and the files it extends have added.

    Attributes:
        file: name as the user gave it.
        text: the source, and those that it extends, as a stream of YAML documents.
        tree: the plain values; keys are strings as written, even numbers.
        places: where the value at each path of the tree is.
    """

    file: str
    text: str
    tree: Any
    places: Mapping[KeyPath, Place]

    def locate(self, path: KeyPath, *, key: bool = False) -> SourceLocation | None:
        """Returns the location of `path` or of its nearest existing ancestor; None if neither
        exists. A scalar is located at its value unless `key` is set, a section at its key."""
        parts = (path[:end] for end in range(len(path), 0, -1))
        found = next((part for part in parts if part in self.places), ())
        if not found:
            return None
        place = self.places[found]
        is_scalar = found == path and not isinstance(get_at_path(self.tree, path), dict | list)
        return place.value if is_scalar and not key else place.key or place.value

    def build_refusal(self, faults: Iterable[Diagnostic]) -> InvalidSpec:
        """Returns the exception for faults of this document, which are located in it."""
        return build_refusal([locate_diagnostic(fault, self) for fault in faults], self.file)


def read_text(path: Path) -> str:
    """Returns the text of a YAML file.

    Raises:
        SpecError: the file cannot be opened.
        InvalidSpec: the file is too large or not UTF-8.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(f"cannot read {escape_unprintable(str(path))}: {error.strerror}") from error
    reading = _DocumentReader(data.decode("utf-8-sig", errors="replace"), str(path))
    if len(data) > MAX_BYTES:
        what = f"{path} is larger than {MAX_BYTES // 1024} KiB, too large for an experiment"
        raise build_refusal([build_error((), what, kind="file")], str(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rest = error.object  # the bytes after a mark of their order
        at = error.start + len(data) - len(rest)
        what = f"the file is not UTF-8: byte 0x{data[at]:02x} at {at}"
        start = len(rest[: error.start].decode())
        reading.refuse(what, reading.locate_character(start), "save it as UTF-8")
        raise build_refusal(reading.faults, str(path)) from error


def parse_yaml_document(text: str, file: str, *, before: str = "", number: int = 0) -> YamlDocument:
    """Parses one YAML document with any value at its root.

    Args:
        file: its name in messages.
        before, number: of the value of an override: what stands before it, and its number, which
            is shown as its line.

    Raises:
        InvalidSpec: lists every fault found; a syntax error hides the faults after it.
    """
    reading = _DocumentReader(text, file, before, number)
    tree = reading.read()
    if reading.faults:
        raise build_refusal(reading.faults, file)
    return YamlDocument(file, text, tree, reading.places)


class _Loader(yaml.BaseLoader):
    """Composes nodes; rejects anchors, aliases and explicit tags."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        problem = ""
        if getattr(event, "anchor", None) is not None:
            problem = "anchors and aliases are not supported: write the value out"
        elif getattr(event, "tag", None) is not None:
            problem = "tags are not supported"
        elif self.depth >= MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} levels"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


_PLAIN_SCALARS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"~|null|Null|NULL|", lambda text: None),
    (r"true|True|TRUE", lambda text: True),
    (r"false|False|FALSE", lambda text: False),
    (r"[-+]?[0-9]+", int),
    (r"0o[0-7]+|0x[0-9a-fA-F]+", lambda text: int(text, 0)),
    (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", float),
    (r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", lambda text: math.inf),
)
"""The plain scalars of YAML 1.2 that are no text, and how they are read."""


class _DocumentReader:
    """Converts PyYAML's nodes of one source, and collects places and faults."""

    def __init__(self, text: str, file: str, before: str = "", number: int = 0) -> None:
        self.text, self.file, self.number = text, file, number
        self.lines = _BREAKS.split(before + text)
        self.shift = len(before)  # of the first line
        self.places: dict[KeyPath, Place] = {}
        self.faults: list[Diagnostic] = []

    def read(self) -> Any:
        self.places[()] = Place(self._locate(0, 0))
        try:
            node = _Loader(self.text).get_single_node()
        except yaml.MarkedYAMLError as error:
            self._report_syntax_error(error)
        except yaml.reader.ReaderError as error:
            name = escape_unprintable(self.text[error.position])
            what = f"the character {name} is not allowed in YAML; write it as an escape in quotes"
            self.refuse(what, self.locate_character(error.position))
        else:
            return None if node is None else self._build(node, ())

    def _build(self, node: yaml.Node, path: KeyPath, key: SourceLocation | None = None) -> Any:
        self.places[path] = Place(self._locate_node(node), key)
        if isinstance(node, yaml.MappingNode):
            items = self._list_items(node, path)
            return {name: self._build(below, (*path, name), at) for name, at, below in items}
        if isinstance(node, yaml.SequenceNode):
            return [self._build(item, (*path, i)) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._read_scalar(node)

    def _list_items(
        self, node: yaml.MappingNode, path: KeyPath
    ) -> Iterator[tuple[str, SourceLocation, yaml.Node]]:
        """Yields each key with its location and PyYAML's node of the value."""
        first: dict[str, int] = {}
        for key, value in node.value:
            position = self._locate_node(key)
            if not isinstance(key, yaml.ScalarNode):
                self.refuse("a key must be plain text", position)
            elif key.value in first:
                label, line = format_key_path((*path, key.value)), first[key.value]
                self.refuse(f"duplicate key '{label}' (first on line {line})", position)
            else:
                first[key.value] = position.line
                yield self._read_text(key), position, value

    def _read_text(self, node: yaml.ScalarNode) -> str:
        text: str = node.value
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            self.refuse("half of a surrogate pair is not a character", self._locate_node(node))
        return text

    def _read_scalar(self, node: yaml.ScalarNode) -> Any:
        text, position = node.value, self._locate_node(node)
        if node.style is not None:
            return self._read_text(node)
        read = next((read for form, read in _PLAIN_SCALARS if re.fullmatch(form, text)), None)
        if read is None:
            if _TYPOGRAPHIC.fullmatch(text):
                what = f"the quotes {text[0]} and {text[-1]} would be part of the text"
                help_ = "write straight quotes, also around these if they are meant"
                self.refuse(what, position, help_)
            return self._read_text(node)
        if len(text) > _MAX_DIGITS:
            self.refuse(f"the number has more than {_MAX_DIGITS} digits", position)
            return 0
        value = read(text)
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(f"{text} is not a finite number", position)
        return value

    def _locate_node(self, node: yaml.Node) -> SourceLocation:
        start, end = node.start_mark, node.end_mark
        width = end.column - start.column
        if end.line > start.line:
            width = len(self.lines[start.line].rstrip()) - start.column
        return self._locate(start.line, start.column, width)

    def _locate(self, line: int, column: int, width: int = 1) -> SourceLocation:
        """The location at a line and column of the text that count from 0."""
        line = min(line, len(self.lines) - 1)
        start = column + 1 + (0 if line else self.shift)
        return SourceLocation(
            self.file, self.number or line + 1, start, max(1, width), self.lines[line]
        )

    def locate_character(self, number: int) -> SourceLocation:
        """The location of a character of the text by its number from 0."""
        lines = _BREAKS.split(self.text[:number])
        return self._locate(len(lines) - 1, len(lines[-1]))

    def refuse(self, message: str, position: SourceLocation, *helps: str) -> None:
        """Adds a fault."""
        self.faults.append(build_error((), message, *helps, kind="syntax", position=position))

    def _report_syntax_error(self, error: yaml.MarkedYAMLError) -> None:
        """Reports what PyYAML did not understand, where it is."""
        mark = error.problem_mark or error.context_mark
        message = ", ".join(filter(None, (error.context, error.problem)))
        # That a line had no colon is noticed on the next one; the context is the line itself.
        if error.context == "while scanning a simple key" and error.context_mark:
            mark, message = error.context_mark, "expected a key, a colon and a space"
        assert mark is not None
        position = self._locate(mark.line, mark.column)
        self.refuse(message, position, self._explain_syntax(error, mark.line))

    def _explain_syntax(self, error: yaml.MarkedYAMLError, number: int) -> str:
        """Returns the help for frequent mistakes, also for those that a line does not show."""
        for near in (number, number - 1):
            if "\u00a0" in "".join(self.lines[near : near + 1]):
                return f"line {near + 1} contains a non-breaking space; write a plain one"
        if re.match(r"<{7} |={7}$|>{7} ", "".join(self.lines[number : number + 1])):
            return "these are the marks of a merge conflict"
        if error.context in ("while parsing a flow mapping", "while parsing a flow sequence"):
            opened = error.context_mark.line + 1 if error.context_mark else number + 1
            return f"close the bracket that line {opened} opens, or separate its items by commas"
        if error.problem == "but found another document":
            return "remove `---`; of a run that extended a file, submit `spec.json` in its folder"
        if error.problem == "mapping values are not allowed here":
            return "quote a value that contains ': '; indent the keys of a section alike"
        if word := re.match(r"\s*(?:- )?([\w.]+):(?=\S)", "".join(self.lines[number : number + 1])):
            return f"write a space after '{word[1]}:'"
        return "indent with spaces" if "'\\t'" in (error.problem or "") else ""


def locate_diagnostic(diagnostic: Diagnostic, document: YamlDocument) -> Diagnostic:
    """Returns the diagnostic with its location in the file; None if the file has no such key."""
    path, helps = diagnostic.path, diagnostic.helps
    if diagnostic.against and path not in document.places and diagnostic.against in document.places:
        path = diagnostic.against
    is_unknown = diagnostic.kind == "unknown_key"
    position = diagnostic.position or document.locate(path, key=is_unknown)
    is_own = position is None or position.file in (document.file, OVERRIDE)
    if is_unknown and not diagnostic.meant and not is_own:
        name = format_key_path(path)
        helps += (f"null for '{name}' in {escape_unprintable(document.file)} leaves it out",)
    return replace(diagnostic, position=position, helps=helps)


def relocate_phase_fault(fault: Diagnostic, number: int, phase: PhaseSpec) -> Diagnostic:
    """Moves a fault of a phase's own spec to the entry of the phase's `set` that causes it: the one
    that shares the longest prefix with its path."""
    at: KeyPath = ("phases", number)
    for steps in ([*map(str, path)] for path in (fault.path, fault.against)):
        shared = {
            key: len(os.path.commonprefix([key.split("."), steps]))  # noqa: RUF071  (of lists)
            for key in phase.set
        }
        best = max(shared, key=shared.__getitem__, default="")
        if shared.get(best):
            at = (*at, "set", best)
            break
    named = f"phase '{phase.name}'" in fault.message
    message = fault.message if named else f"{fault.message} (phase '{phase.name}')"
    return replace(fault, path=at, against=(), meant="", message=message)
