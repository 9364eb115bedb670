"""Reads knowledge graphs from TSV, JSONL and N-Triples files (UTF-8), line by line."""

import gzip
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rlx_plugins.kg.graph import Graph
from rlx_plugins.kg.ntriples import RdfLiteral, parse_statement
from rlx_plugins.kg.text import escape_text, has_visible_text

_Fact = tuple[str, str, str]


@lru_cache(maxsize=1)
def load_world_graph() -> Graph:
    """Returns the graph shipped with rlx: countries, capitals, borders, currencies and so on."""
    with as_file(files("rlx_plugins.kg") / "data" / "world.tsv") as path:
        return read_graph(path)


def read_graph(path: Path) -> Graph:
    """Reads a graph from a file; the extension selects the format.

    `.tsv`: subject, relation and object, separated by tabs; lines that begin with `#` are comments.
    The relations `rlx:label`, `rlx:kind` and `rlx:alias` give an entity's label, kind and aliases;
    a relation may have a label as well.

    `.jsonl`: objects `{"subject", "relation", "object"}`, and `{"id", "label", "kind",
    "aliases"}`, in which all keys but `id` are optional.

    `.nt`: N-Triples. `rdfs:label` gives the label; if there are several, one in English or without
    a language. Other labels and `skos:altLabel` give aliases. Without a label, the last part of the
    IRI is used if it is unique.

    Files may be compressed with gzip: `.tsv.gz`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is malformed; the message names file and line.
    """
    path = Path(path)
    reader = _READERS.get(Path(path.name.removesuffix(".gz")).suffix)
    if reader is None:
        known = ", ".join(_READERS)
        raise ValueError(f"{path}: its name must end in one of {known}, perhaps with .gz after it")
    content = reader()
    facts = content.facts(path)
    graph = Graph.from_triples(
        facts, labels=content.labels, aliases=content.aliases, kinds=content.kinds
    )
    if not len(graph):
        raise ValueError(f"{path}: has no facts")
    return graph


def read_file_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file; decompresses files whose name ends in `.gz`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a complete gzip file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield from stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not readable as gzip: {error}") from None
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror or error}") from None


class _Reader(ABC):
    """Parses a file line by line; its names are complete once all facts have been read."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {}
        self.aliases: dict[str, list[str]] = {}
        self.kinds: dict[str, str] = {}

    def facts(self, path: Path) -> Iterator[_Fact]:
        """Yields the facts of a file, and collects its names.

        Raises:
            OSError, ValueError: as `read_graph`.
        """
        for number, line in enumerate(read_file_lines(path), start=1):
            try:
                fact = self.parse_fact_line(decode_line(line))
            except ValueError as error:
                raise ValueError(f"{path} line {number}: {error}") from None
            if fact is not None:
                yield fact

    @abstractmethod
    def parse_fact_line(self, line: str) -> _Fact | None:
        """The fact of a line; None if it is empty, a comment or a name."""

    def name(self, id_: str, what: str, text: str) -> None:
        """Adds a label, kind or alias of an id.

        Raises:
            ValueError: the id already has another label or kind.
        """
        if what == "alias":
            self.aliases.setdefault(id_, []).append(text)
            return
        known = (self.labels if what == "label" else self.kinds).setdefault(id_, text)
        if known != text:
            raise ValueError(f"{id_!r} has two {what}s: {known!r} and {text!r}")


class _Tsv(_Reader):
    def parse_fact_line(self, line: str) -> _Fact | None:
        if not line.strip() or line.startswith("#"):
            return None
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) != 3 or not all(cells):
            raise ValueError(
                "expected subject, relation and object separated by tabs, "
                f"got {sum(map(bool, cells))} of them in {len(cells)} columns"
            )
        if blank := [cell for cell in cells if not has_visible_text(cell)]:
            raise ValueError(f"expected visible text, got {blank[0]!r}")
        subject, relation, object_ = cells
        if not relation.startswith("rlx:"):
            return subject, relation, object_
        if relation not in ("rlx:label", "rlx:kind", "rlx:alias"):
            raise ValueError(f"expected rlx:label, rlx:kind or rlx:alias, got {relation!r}")
        self.name(subject, relation.removeprefix("rlx:"), object_)
        return None


class _Jsonl(_Reader):
    def parse_fact_line(self, line: str) -> _Fact | None:
        if not line.strip():
            return None
        record = parse_json_object(line)
        if set(record) == {"subject", "relation", "object"}:
            return (
                _get_text_field(record, "subject"),
                _get_text_field(record, "relation"),
                _get_text_field(record, "object"),
            )
        if "id" not in record or not set(record) <= {"id", "label", "kind", "aliases"}:
            raise ValueError(
                "expected the keys subject, relation and object, or id with some of label, kind "
                f"and aliases, got {', '.join(record) or 'none'}"
            )
        id_ = _get_text_field(record, "id")
        for what in ("label", "kind"):
            if what in record:
                self.name(id_, what, _get_text_field(record, what))
        aliases = record.get("aliases", [])
        if not isinstance(aliases, list):
            raise ValueError(f"expected a list of texts as aliases, got {aliases!r}")
        for alias in aliases:
            self.name(id_, "alias", _get_text_field({"aliases": alias}, "aliases"))
        return None


def _get_text_field(record: Mapping[str, Any], key: str) -> str:
    return require_json_text(record[key], key)


def require_json_text(value: Any, what: str) -> str:
    """Returns a JSON value that must be a text.

    Raises:
        ValueError: it is not a string, has no visible text, or contains a lone surrogate.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected non-empty text as {what}, got {value!r}")
    if value.isprintable():  # the usual case, and much faster
        return value
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"a lone surrogate is not a character: {value!r}")
    if not has_visible_text(value):
        raise ValueError(f"expected visible text as {what}, got {value!r}")
    return value


def decode_line(line: bytes) -> str:
    """Returns the text of a line, without a byte order mark.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return line.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def parse_json_object(line: str) -> Mapping[str, Any]:
    """Parses a JSON object.

    Raises:
        ValueError: the text is not a JSON object.
    """
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


_LABEL = "http://www.w3.org/2000/01/rdf-schema#label"
_ALIAS = "http://www.w3.org/2004/02/skos/core#altLabel"


class _NTriples(_Reader):
    def __init__(self) -> None:
        super().__init__()
        self._called: dict[str, set[tuple[bool, str, str]]] = {}
        self._entities: set[str] = set()
        self._relations: set[str] = set()

    def facts(self, path: Path) -> Iterator[_Fact]:
        yield from super().facts(path)
        self._settle_names()

    def parse_fact_line(self, line: str) -> _Fact | None:
        found = parse_statement(line)
        if found is None:
            return None
        subject, relation, object_ = found
        if not isinstance(object_, RdfLiteral):
            return self._fact(subject, relation, object_)
        if relation == _LABEL and escape_text(object_.text):
            foreign = object_.language.partition("-")[0] not in ("", "en")
            name = (foreign, object_.language, object_.text)
            self._called.setdefault(subject, set()).add(name)
            return None
        if relation == _ALIAS and escape_text(object_.text):
            self.name(subject, "alias", object_.text)
            return None
        return self._fact(subject, relation, self._build_literal_id(object_))

    def _build_literal_id(self, literal: RdfLiteral) -> str:
        text, language, datatype = literal
        suffix = f"@{language}" if language else f"^^{datatype}" if datatype else ""
        id_ = f'"{text}"{suffix}'  # unambiguous: no IRI or blank node begins with a quotation mark
        if escape_text(text):
            self.labels[id_] = text
        return id_

    def _fact(self, subject: str, relation: str, object_: str) -> _Fact:
        self._entities.update((subject, object_))
        self._relations.add(relation)
        return subject, relation, object_

    def _settle_names(self) -> None:
        for id_, names in self._called.items():
            first, *others = [text for _, _, text in sorted(names)]
            self.labels[id_] = first
            for other in others:
                self.name(id_, "alias", other)
        for ids in (self._entities, self._relations):
            self._shorten([id_ for id_ in ids if id_ not in self.labels and id_[0] not in '_"'])

    def _shorten(self, iris: Iterable[str]) -> None:
        ends = {iri: re.split("[/#:]", iri.rstrip("/#:"))[-1] for iri in iris}
        common = Counter(end.casefold() for end in ends.values())
        for iri, end in ends.items():
            if common[end.casefold()] == 1 and escape_text(end):
                self.labels[iri] = end


_READERS: Mapping[str, type[_Reader]] = {".tsv": _Tsv, ".jsonl": _Jsonl, ".nt": _NTriples}
