"""Problems of the task `kg` from files: questions with their own graphs, kept compressed."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from rlx.plugin import Problem, Split
from rlx_plugins.kg.prompts import fill_prompt
from rlx_plugins.kg.source import source_name
from rlx_plugins.kg.subgraphs import FileQuestion, find_name_files, read_questions
from rlx_plugins.records import Source, Stamp

_LEVEL = 1
"""Compression level: the fastest. Facts share few names, so it already saves nine tenths."""


class KgQuestionFiles(BaseModel):
    """Files of questions with their own graphs, in a format of `read_questions`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: Path
    test: Path


@dataclass(frozen=True, slots=True)
class FileProblem:
    """A problem whose facts are compressed: CWQ has more facts than memory could hold as objects.

    Attributes:
        bare: the problem without its field `triples`.
        packed: the triples as compressed JSON.
    """

    bare: Problem
    packed: bytes

    def unpack(self) -> Problem:
        """Returns the whole problem."""
        triples = json.loads(zlib.decompress(self.packed))
        return replace(self.bare, fields={**self.bare.fields, "triples": triples})


def load_file_problems(
    files: KgQuestionFiles, split: Split, prompt: str
) -> tuple[FileProblem, ...]:
    """The problems of a split's file: those with an answer, for training not those of the test.

    They are read once per process and state of the files.

    Args:
        files: the question files.
        split: which of them.
        prompt: the template of the prompts; see `fill_prompt`.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is malformed, or no problem is left.
    """
    paths = [files.train, files.test]
    beside = [found for path in paths for found in find_name_files(path)]
    return _load_split(files, split, prompt, Source(path=(*paths, *beside)).stamps())


@lru_cache(maxsize=4)
def _load_split(
    files: KgQuestionFiles, split: Split, prompt: str, stamps: tuple[Stamp, ...]
) -> tuple[FileProblem, ...]:
    path = files.train if split == "train" else files.test
    tested = _load_split(files, "test", prompt, stamps) if split == "train" else ()
    known = {name for problem in tested for name in _list_identities(problem)}
    problems = tuple(
        problem
        for problem in _build_file_problems(path, split, prompt)
        if known.isdisjoint(_list_identities(problem))
    )
    if not problems:
        raise ValueError(f"{path}: holds no question with an answer for the split {split!r}")
    return problems


def _list_identities(problem: FileProblem) -> tuple[str, str]:
    """Two problems are the same if they share an id or the question's text."""
    return f"id {problem.bare.id}", f"question {problem.bare.fields['question']}"


def _build_file_problems(path: Path, split: Split, prompt: str) -> Iterator[FileProblem]:
    for record in read_questions(path):
        if record.answers:
            yield _build_file_problem(record, split, path, prompt)


def _build_file_problem(record: FileQuestion, split: Split, path: Path, prompt: str) -> FileProblem:
    fields = {
        "question": record.question,
        "answers": [list(names) for names in record.answers],
        "any_of": False,
        "type": "file",
        "data_source": source_name(str(path)),
        "split": split,
        "start": list(record.entities),
    }
    text = fill_prompt(prompt, record.question, record.entities)
    packed = zlib.compress(json.dumps(record.triples).encode(), _LEVEL)
    return FileProblem(Problem(id=f"kg/{record.id}", prompt=text, fields=fields), packed)
