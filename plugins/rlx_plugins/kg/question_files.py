"""Problems of the task `kg` from files: questions with their own graphs, kept compressed.

The format is that of RoG on the Hugging Face hub, for WebQSP and CWQ: `id`, `question`, `answer`,
`q_entity` and `graph`, all by name.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlx.plugin import Problem, Split
from rlx_plugins.kg.text import fill_prompt, has_visible_text
from rlx_plugins.records import Source, Stamp, get_value_at_path

_LEVEL = 1
"""Compression level: the fastest. Facts share few names, so it already saves nine tenths."""


class KgQuestionFiles(BaseModel):
    """Files of questions with their own graphs: `.jsonl`, `.jsonl.gz` or `.parquet`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: Path
    test: Path

    def digests(self) -> dict[str, str]:
        return {
            **Source(path=self.train).digests("train"),
            **Source(path=self.test).digests("test"),
        }


@dataclass(frozen=True, slots=True)
class FileProblem:
    """A problem with its facts as compressed JSON: CWQ has more than memory holds as objects."""

    bare: Problem
    packed: bytes

    def unpack(self) -> Problem:
        triples = json.loads(zlib.decompress(self.packed))
        return replace(self.bare, fields={**self.bare.fields, "triples": triples})


def load_file_problems(
    files: KgQuestionFiles, split: Split, prompt: str
) -> tuple[FileProblem, ...]:
    """The problems of a split's file: those with an answer, for training not those of the test."""
    return _load_split(files, split, prompt, Source(path=(files.train, files.test)).stamps())


@lru_cache(maxsize=4)
def _load_split(
    files: KgQuestionFiles, split: Split, prompt: str, stamps: tuple[Stamp, ...]
) -> tuple[FileProblem, ...]:
    path = files.train if split == "train" else files.test
    tested = _load_split(files, "test", prompt, stamps) if split == "train" else ()
    known = {name for problem in tested for name in _list_identities(problem)}
    read = Source(path=path).parse_rows(lambda record: _read_problem(record, split, path, prompt))
    problems = tuple(
        problem
        for _, problem in read
        if problem.bare.fields["answers"] and known.isdisjoint(_list_identities(problem))
    )
    if not problems:
        raise ValueError(f"{path}: holds no question with an answer for the split {split!r}")
    return problems


def _list_identities(problem: FileProblem) -> tuple[str, str]:
    """Two problems are the same if they share an id or the question's text."""
    return f"id {problem.bare.id}", f"question {problem.bare.fields['question']}"


def _read_problem(record: Mapping[str, Any], split: Split, path: Path, prompt: str) -> FileProblem:
    question = _require_visible_text(get_value_at_path(record, "question"), "question")
    answers = [_require_visible_text(n, "an answer") for n in _get_list(record, "answer")]
    entities = [_require_visible_text(n, "an entity") for n in _get_list(record, "q_entity")]
    triples = _get_list(record, "graph")
    for fact in triples:
        if not isinstance(fact, list) or len(fact) != 3:
            raise ValueError(f"expected a fact of three parts, got {fact!r}")
        for value, what in zip(fact, ("a subject", "a relation", "an object"), strict=True):
            _require_visible_text(value, what)
    fields = {
        "question": question,
        "answers": [[name] for name in dict.fromkeys(answers)],
        "any_of": False,
        "type": "file",
        "data_source": f"kg.{path.name.split('.')[0]}",
        "split": split,
        "start": entities,
    }
    text = fill_prompt(prompt, question, entities)
    id_ = f"kg/{get_value_at_path(record, 'id')}"
    packed = zlib.compress(json.dumps(triples).encode(), _LEVEL)
    return FileProblem(Problem(id=id_, prompt=text, fields=fields), packed)


def _get_list(record: Mapping[str, Any], field: str) -> list[Any]:
    value = get_value_at_path(record, field)
    if not isinstance(value, list):
        raise ValueError(f"expected a list as {field}, got {value!r}")
    return value


def _require_visible_text(value: Any, what: str) -> str:
    if isinstance(value, str):
        if value.isprintable() and value.strip():  # the usual case, and much faster
            return value
        if has_visible_text(value) and not any("\ud800" <= c <= "\udfff" for c in value):
            return value
    raise ValueError(f"expected visible text as {what}, got {value!r}")
