"""Reads questions with their own subgraphs: WebQSP and CWQ in their published formats.

There are two families of files, distinguished by their fields.

NSM, also used by GNN-RAG and KG-R1: `id`, `question`, `answers` (each with `kb_id` and `text`),
`entities`, `subgraph` with `tuples`. Entities and relations are texts, or line numbers (from 0) in
`entities.txt` and `relations.txt` beside the file. Their names are in `entities_text.txt`, line by
line, and in `entities_names.json`, by id.

RoG on the Hugging Face hub, also used by SubgraphRAG: `id`, `question`, `answer`, `q_entity` and
`graph`, all by name.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlx.plugin import expand_path
from rlx_plugins.kg.text import escape_text, has_visible_text
from rlx_plugins.records import (
    Source,
    get_value_at_path,
    parse_json_object,
    read_json_lines,
    read_text_lines,
)

_Fact = tuple[str, str, str]

_BESIDE = "entities.txt", "relations.txt", "entities_text.txt", "entities_names.json"
_ENTITIES, _RELATIONS, _TEXTS, _BY_ID = _BESIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class FileQuestion:
    """A question of a data set with its subgraph.

    Entities have the data set's names; if two entities of a graph share a name, or an entity has
    none, its id is used.

    Attributes:
        id: the question's id.
        question: the question's text.
        answers: the distinct right answers, each with its acceptable names; empty if the data set
            has none.
        entities: the topic entities of the question.
        triples: subject, relation and object of each fact.
    """

    id: str
    question: str
    answers: tuple[tuple[str, ...], ...]
    entities: tuple[str, ...]
    triples: tuple[_Fact, ...]


def read_questions(path: Path) -> Iterator[FileQuestion]:
    """Reads questions from a `.jsonl`, `.json` (an object per line, or a list) or `.parquet` file.

    All but `.parquet` may be compressed with gzip: `.json.gz`.

    Raises:
        OSError: the file, or a file of names that it needs, cannot be read.
        ValueError: a file is malformed; the message names file and line.
    """
    path = expand_path(path)
    vocabulary = _Vocabulary(path.parent)
    for where, record in _read_question_records(path):
        try:
            if "subgraph" in record:
                yield _parse_nsm_question(record, vocabulary)
            elif "graph" in record:
                yield _parse_rog_question(record)
            else:
                raise ValueError(f"expected a field subgraph or graph, got {', '.join(record)}")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def find_name_files(path: Path) -> tuple[Path, ...]:
    """Returns the existing files of ids and names beside a question file."""
    beside = (expand_path(path).parent / name for name in _BESIDE)
    return tuple(found for found in beside if found.exists())


# Rows --------------------------------------------------------------------------------------------


def _read_question_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if path.suffix == ".parquet":
        yield from Source(path=path).rows()
        return
    if suffix not in (".jsonl", ".json"):
        raise ValueError(f"{path}: its name must end in .jsonl, .json or .parquet")
    first = next((line for _, line in read_text_lines(path)), "")
    yield from _read_list_records(path) if first.lstrip().startswith("[") else read_json_lines(path)


def _read_list_records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        records = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from None
    for number, record in enumerate(records, start=1):
        where = f"{path} record {number}"
        if not isinstance(record, dict):
            raise ValueError(f"{where}: not a JSON object")
        yield where, record


def _read_text(path: Path) -> str:
    return "".join(line for _, line in read_text_lines(path))


def _require_json_text(value: Any, what: str) -> str:
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


def _get_list_field(record: Mapping[str, Any], field: str) -> Sequence[Any]:
    value = get_value_at_path(record, field)
    if not isinstance(value, list):
        raise ValueError(f"expected a list as {field}, got {value!r}")
    return value


def _check_fact_triple(fact: Any) -> Sequence[Any]:
    if not isinstance(fact, list) or len(fact) != 3:
        raise ValueError(f"expected a fact of three parts, got {fact!r}")
    return fact


def _remove_duplicate_answers(answers: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(answers))


# RoG: all by name --------------------------------------------------------------------------------


def _parse_rog_question(record: Mapping[str, Any]) -> FileQuestion:
    facts = (_check_fact_triple(fact) for fact in _get_list_field(record, "graph"))
    return FileQuestion(
        id=str(get_value_at_path(record, "id")),
        question=_require_json_text(get_value_at_path(record, "question"), "question"),
        answers=_remove_duplicate_answers(
            (_require_json_text(name, "an answer"),) for name in _get_list_field(record, "answer")
        ),
        entities=tuple(
            _require_json_text(name, "an entity") for name in _get_list_field(record, "q_entity")
        ),
        triples=tuple(
            (
                _require_json_text(s, "a subject"),
                _require_json_text(r, "a relation"),
                _require_json_text(o, "an object"),
            )
            for s, r, o in facts
        ),
    )


# NSM: by id, by number, or as objects ------------------------------------------------------------


class _Vocabulary:
    """The files beside a question file: ids by number, and names by id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def entities(self) -> Sequence[str]:
        return self._words(_ENTITIES)

    @cached_property
    def relations(self) -> Sequence[str]:
        return self._words(_RELATIONS)

    @cached_property
    def names(self) -> Mapping[str, str]:
        names: dict[str, str] = {}
        texts, by_id = self._folder / _TEXTS, self._folder / _BY_ID
        if texts.exists():
            called = self._words(texts.name)
            if len(called) != len(self.entities):
                raise ValueError(
                    f"{texts} has {len(called)} lines and entities.txt {len(self.entities)}: "
                    "it must name each entity on the line that has its id"
                )
            names.update(zip(self.entities, called, strict=True))
        if by_id.exists():
            try:
                names.update(parse_json_object(_read_text(by_id)))
            except ValueError as error:
                raise ValueError(f"{by_id}: {error}") from None
        return names

    def _words(self, name: str) -> Sequence[str]:
        return [line.strip() for _, line in read_text_lines(self._folder / name)]


class _QuestionNames:
    """The names of one question's entities."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._names: dict[str, str] = {}

    def resolve_entity_id(self, value: Any) -> str:
        """Returns the id of an entity in a record, and stores its name."""
        if isinstance(value, dict):
            id_ = _resolve_vocabulary_id(
                value.get("kb_id") or value.get("text"), self._vocabulary, "entities"
            )
            name = value.get("text")
        else:
            id_, name = _resolve_vocabulary_id(value, self._vocabulary, "entities"), None
        name = name or self._vocabulary.names.get(id_)
        if isinstance(name, str) and escape_text(name):
            self._names.setdefault(id_, _require_json_text(name, "a name"))
        return id_

    def select_unique_names(self) -> Mapping[str, str]:
        """Names by id, without names shared by several entities."""
        common = Counter(escape_text(name).casefold() for name in self._names.values())
        return {
            id_: name
            for id_, name in self._names.items()
            if common[escape_text(name).casefold()] == 1
        }


def _resolve_vocabulary_id(value: Any, vocabulary: _Vocabulary, kind: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return _require_json_text(value, f"one of the {kind}")
    ids: Sequence[str] = getattr(vocabulary, kind)
    if not 0 <= value < len(ids):
        raise ValueError(f"{kind}.txt has no line for the number {value}; it has {len(ids)}")
    return _require_json_text(ids[value], f"line {value + 1} of {kind}.txt")


def _resolve_relation_id(value: Any, vocabulary: _Vocabulary) -> str:
    if isinstance(value, dict):
        value = value.get("text") or value.get("rel_id") or value.get("kb_id")
    return _resolve_vocabulary_id(value, vocabulary, "relations")


def _parse_nsm_question(record: Mapping[str, Any], vocabulary: _Vocabulary) -> FileQuestion:
    called = _QuestionNames(vocabulary)
    facts = [
        (
            called.resolve_entity_id(s),
            _resolve_relation_id(r, vocabulary),
            called.resolve_entity_id(o),
        )
        for s, r, o in map(_check_fact_triple, _get_list_field(record, "subgraph.tuples"))
    ]
    topics = _get_list_field(record, "entities_cid" if "entities_cid" in record else "entities")
    about = [called.resolve_entity_id(value) for value in topics]
    names = called.select_unique_names()
    return FileQuestion(
        id=str(get_value_at_path(record, "id")),
        question=_require_json_text(get_value_at_path(record, "question"), "question"),
        answers=_remove_duplicate_answers(
            _parse_answer_names(a, vocabulary, names) for a in _get_list_field(record, "answers")
        ),
        entities=tuple(names.get(id_, id_) for id_ in about),
        triples=tuple((names.get(s, s), r, names.get(o, o)) for s, r, o in facts),
    )


def _parse_answer_names(
    value: Any, vocabulary: _Vocabulary, names: Mapping[str, str]
) -> tuple[str, ...]:
    """The acceptable names of one answer: its text, its name in the graph, and its id."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an answer with kb_id and text, got {value!r}")
    found = [value.get("text")]
    if value.get("kb_id") is not None:
        id_ = _resolve_vocabulary_id(value["kb_id"], vocabulary, "entities")
        found += [names.get(id_), id_]
    acceptable = tuple(
        dict.fromkeys(_require_json_text(name, "an answer") for name in found if name)
    )
    if not acceptable:
        raise ValueError(f"an answer has neither text nor kb_id: {value!r}")
    return acceptable
