"""Parses YAML into plain values, and the location of each in the source.

It implements the YAML 1.2 core schema: `1e-5` is a number, `no` is text, `12:30` is text. Features
that experiments do not need and that cause mistakes are rejected: duplicate keys, tags, anchors,
several documents.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
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
    build_refusal,
    format_key_path,
)
from rlx.spec.training import PhaseSpec
from rlx.text import escape_unprintable

MAX_BYTES = 262_144
MAX_DEPTH = 32
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
        text: the source.
        tree: the plain values; keys are strings as written, even numbers.
        places: where the value at each path of the tree is.
        bases: name and text of each file that it extends, the nearest first.
    """

    file: str
    text: str
    tree: Any
    places: Mapping[KeyPath, Place]
    bases: tuple[tuple[str, str], ...] = ()

    @property
    def whole_text(self) -> str:
        """The source and those of the files that it extends, as a stream of YAML documents."""
        parts = [f"--- # {escape_unprintable(name)}\n{text}" for name, text in self.bases]
        return "".join(f"{part.rstrip()}\n" for part in (self.text, *parts)) if parts else self.text

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
    if len(data) > MAX_BYTES:
        message = f"the file is larger than {MAX_BYTES // 1024} KiB, too large for an experiment"
        raise build_refusal([Diagnostic(kind="file", message=message)], str(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", errors="replace")
        lines = _BREAKS.split(before)
        text = lines[-1] + data[error.start :].split(b"\n")[0].decode("utf-8", errors="replace")
        fault = Diagnostic(
            kind="file",
            message=f"the file is not UTF-8: byte 0x{data[error.start]:02x} at {error.start}",
            position=SourceLocation(str(path), len(lines), len(lines[-1]) + 1, 1, text),
            helps=("save it as UTF-8",),
        )
        raise build_refusal([fault], str(path)) from error


def parse_yaml_document(text: str, file: str) -> YamlDocument:
    """Parses one YAML document with any value at its root; `file` is its name in messages.

    Raises:
        InvalidSpec: lists every fault found; a syntax error hides the faults after it.
    """
    reading = _DocumentReader(text, file)
    tree = reading.read()
    if reading.faults:
        raise build_refusal(reading.faults, file)
    return YamlDocument(file, text, tree, reading.places)


class _Loader(yaml.SafeLoader):
    """Composes nodes with YAML 1.2 core tags; rejects anchors, aliases and explicit tags."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own class attribute, not shared here)
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


for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z", list("tTfF")),
    ("int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z", list("-+0123456789")),
    (
        "float",
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


class _DocumentReader:
    """Converts PyYAML's nodes of one source, and collects places and faults."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.lines = _BREAKS.split(text)
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
            lines = _BREAKS.split(self.text[: error.position])
            self._refuse(
                f"the character {name} is not allowed in YAML; write it as an escape in quotes",
                self._locate(len(lines) - 1, len(lines[-1])),
            )
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
                self._refuse("a key must be plain text", position)
            elif key.value in first:
                at = (*path, key.value)
                label, line = format_key_path(at), first[key.value]
                self._refuse(f"duplicate key '{label}' (first on line {line})", position, path=at)
            else:
                first[key.value] = position.line
                yield self._read_text(key), position, value

    def _read_text(self, node: yaml.ScalarNode) -> str:
        text: str = node.value
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            self._refuse("half of a surrogate pair is not a character", self._locate_node(node))
        return text

    def _read_scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        tag = node.tag.rpartition(":")[2]
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() == "true"
        if tag == "str":
            if node.style is None and _TYPOGRAPHIC.fullmatch(text):
                message = f"the quotes {text[0]} and {text[-1]} would be part of the text"
                help_ = "write straight quotes, also around these if they are meant"
                self._refuse(message, self._locate_node(node), help_)
            return self._read_text(node)
        if len(text) > _MAX_DIGITS:
            self._refuse(f"the number has more than {_MAX_DIGITS} digits", self._locate_node(node))
            return 0
        if tag == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        number = float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        if not math.isfinite(number):
            self._refuse(f"{text} is not a finite number", self._locate_node(node))
        return number

    def _locate_node(self, node: yaml.Node) -> SourceLocation:
        start, end = node.start_mark, node.end_mark
        stop = end.column if end.line == start.line else len(self.lines[start.line].rstrip())
        return self._locate(start.line, start.column, stop - start.column)

    def _locate(self, line: int, column: int, width: int = 1) -> SourceLocation:
        """The location at a line and column that count from 0."""
        text = self.lines[min(line, len(self.lines) - 1)]
        return SourceLocation(self.file, line + 1, column + 1, max(1, width), text)

    def _refuse(
        self, message: str, position: SourceLocation, *helps: str, path: KeyPath = ()
    ) -> None:
        self.faults.append(
            Diagnostic(kind="syntax", message=message, path=path, position=position, helps=helps)
        )

    def _report_syntax_error(self, error: yaml.MarkedYAMLError) -> None:
        """Reports what PyYAML did not understand, where it is."""
        mark = error.problem_mark or error.context_mark
        message = ", ".join(filter(None, (error.context, error.problem)))
        # That a line had no colon is noticed on the next one; the context is the line itself.
        if error.context == "while scanning a simple key" and error.context_mark:
            mark, message = error.context_mark, "expected a key, a colon and a space"
        assert mark is not None
        helps = filter(None, [self._explain_syntax(error, mark.line)])
        self._refuse(message, self._locate(mark.line, mark.column), *helps)

    def _explain_syntax(self, error: yaml.MarkedYAMLError, number: int) -> str:
        """Returns the help for frequent mistakes, also for those that a line does not show."""
        line = self.lines[min(number, len(self.lines) - 1)]
        for near in (number, number - 1):
            if "\u00a0" in "".join(self.lines[near : near + 1]):
                return f"line {near + 1} contains a non-breaking space; write a plain one"
        if re.match(r"<{7} |={7}$|>{7} ", line):
            return "these are the marks of a merge conflict"
        if error.context in ("while parsing a flow mapping", "while parsing a flow sequence"):
            opened = error.context_mark.line + 1 if error.context_mark else number + 1
            return f"close the bracket that line {opened} opens, or separate its items by commas"
        if error.problem == "but found another document":
            return "remove `---`; of a run that extended a file, submit `spec.json` in its folder"
        if error.problem == "mapping values are not allowed here":
            return "quote a value that contains ': '; indent the keys of a section alike"
        if word := re.match(r"\s*(?:- )?([\w.]+):(?=\S)", line):
            return f"write a space after '{word[1]}:'"
        return "indent with spaces" if "'\\t'" in (error.problem or "") else ""


def locate_diagnostic(diagnostic: Diagnostic, document: YamlDocument) -> Diagnostic:
    """Returns the diagnostic with its location in the file; None if the file has no such key."""
    path, helps = diagnostic.path, diagnostic.helps
    if diagnostic.against and path not in document.places and diagnostic.against in document.places:
        path = diagnostic.against
    is_unknown = diagnostic.kind == "unknown_key"
    position = diagnostic.position or document.locate(path, key=is_unknown)
    if position is None:
        return diagnostic
    if is_unknown and not diagnostic.meant and position.file in dict(document.bases):
        name = format_key_path(path)
        helps += (f"null for '{name}' in {escape_unprintable(document.file)} leaves it out",)
    start = position.column - 1
    if diagnostic.kind == "value" and position.text[start : start + position.width] == "~":
        helps = ("in YAML, ~ is null: put a path in quotes, such as '~/models/mine'",)
    return replace(diagnostic, position=position, helps=helps)


def relocate_phase_fault(fault: Diagnostic, number: int, phase: PhaseSpec) -> Diagnostic:
    """Moves a fault of a phase's own spec to the entry of the phase's `set` that causes it."""
    where = _find_phase_setting(fault.path, phase.set) or _find_phase_setting(
        fault.against, phase.set
    )
    named = f"phase '{phase.name}'" in fault.message
    message = fault.message if named else f"{fault.message} (phase '{phase.name}')"
    path = ("phases", number, *where)
    return replace(fault, path=path, against=(), meant="", message=message)


def _find_phase_setting(path: KeyPath, settings: Mapping[str, Any]) -> KeyPath:
    """Returns the `set` entry that shares the longest prefix with `path`; empty if none does."""
    steps = [*map(str, path)]
    shared = {
        key: len(os.path.commonprefix([key.split("."), steps]))  # noqa: RUF071  (of lists)
        for key in settings
    }
    best = max(settings, key=shared.__getitem__, default="")
    return ("set", best) if shared.get(best) else ()
