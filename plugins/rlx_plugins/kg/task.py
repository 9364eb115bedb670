"""The task `kg`: questions over a graph, generated from a seed or read from files."""

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import count
from operator import add
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rlx.plugin import Action, Demonstration, Plugin, Problem, Split
from rlx_plugins.kg.demonstrations import MIX, next_turn
from rlx_plugins.kg.environment import KgEnvironment
from rlx_plugins.kg.graph import GraphView, load_world_graph
from rlx_plugins.kg.questions import (
    KgQuestion,
    Type,
    build_question_population,
    format_question,
    list_question_templates,
)
from rlx_plugins.kg.text import fill_prompt, has_visible_text
from rlx_plugins.records import Source, Stamp, get_value_at_path, pick_problem
from rlx_plugins.templates import list_template_fields

_ROUND = 1000
"""Problems per round; every round has the same number of problems of each type."""
_ONE_HOP = ("forward", "inverse")
_EASY_LESSONS = 12_800
"""Initial lessons: good episodes, with one-hop questions if there are any."""
_LESSON_WORLDS = 512
"""Lessons use the worlds from 1 to this number, so that facts cannot be memorized."""
_MAX_DEMONSTRATION_TURNS = 16

_Asked = tuple[KgQuestion, str]
"""A question and the template that words it."""


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


class KgTask(Plugin):
    """Template questions about a knowledge graph, with all right answers.

    A share of the facts is held out: training questions never need a held-out fact, and the
    environment hides these facts during training; test questions cannot be answered without one.
    Each split uses all wordings of its questions, shuffled by the seed in every pass, with types in
    proportion to their weights.
    """

    types: dict[Type, float] = Field(
        default={"forward": 0.3, "inverse": 0.2, "hop2": 0.2, "neighbour": 0.15, "hop3": 0.15}
    )
    """Weights of the types of question; types without a weight are not asked."""
    answers: Literal["one", "every"] = "one"
    """Ask for one of the right answers, or for all of them."""
    held_out: float = Field(0.15, gt=0, lt=1)
    """Share of the facts held out for testing."""
    world: int = Field(0, ge=0)
    """0 asks about the graph as it is. Any other number permutes entity names within their kinds,
    so that a model cannot use its knowledge of the real world."""
    files: KgQuestionFiles | None = None
    """Read questions of WebQSP or CWQ from files instead. Questions without an answer are left out,
    as are training questions that also occur in the test file."""
    prompt: str = "{question}"
    """Template of the prompt. `{entities}` shows the topic entities of the question, from which a
    search can start, escaped and in quotes: `"Ada", "Bob"`; `none` if there is none."""

    @field_validator("types")
    @classmethod
    def _check_weights(cls, value: dict[Type, float]) -> dict[Type, float]:
        if not value or not all(0 < weight < float("inf") for weight in value.values()):
            raise ValueError("the weights must be finite and above 0, and at least one")
        return value

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: str) -> str:
        names = set(list_template_fields(value))
        if "question" not in names or names - {"question", "entities"}:
            raise ValueError("must hold {question}, perhaps {entities}, and no other field")
        return value

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        generated = self.model_fields_set - {"files", "prompt"}
        if self.files is not None and generated:
            raise ValueError(f"{', '.join(sorted(generated))}: has no effect with files")
        return self

    @property
    def demonstrates(self) -> bool:
        return self.files is None

    def check(self) -> None:
        for split in ("train", "test"):
            if self.files is not None:
                load_file_problems(self.files, split, self.prompt)
            else:
                self._get_question_wordings(split)

    def data(self) -> Mapping[str, str]:
        if self.files is None:
            return {"graph": load_world_graph().digest}
        return self.files.digests()

    @property
    def stand_ins(self) -> str:
        return "questions about the shipped graph" if self.files is not None else ""

    def stand_in(self, index: int, seed: int) -> Problem:
        return KgTask(prompt=self.prompt).problem("train", index, seed)

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        if self.files is not None:
            records = load_file_problems(self.files, split, self.prompt)
            return pick_problem(records, split, index, f"kg/{seed}/file").unpack()
        rounds, slot = divmod(index, _ROUND)
        type_, rank, quota = _build_round_slots(tuple(self.types.items()), seed)[slot]
        wordings = self._get_question_wordings(split)[type_]
        purpose = f"kg/{seed}/{split}/{type_}"  # a test is shuffled too
        asked = pick_problem(wordings, "train", rounds * quota + rank, purpose)
        hide = self.held_out if split == "train" else 0.0
        return self._problem(split, *asked, world=self.world, hide=hide)

    def lesson(self, index: int, seed: int) -> Problem:
        if self.files is not None:
            raise NotImplementedError("task.files: questions from files have no lessons")
        rng = random.Random(f"kg/lesson/{seed}/{index}")
        easy = index < _EASY_LESSONS
        weights = {t: w for t, w in self.types.items() if easy and t in _ONE_HOP} or self.types
        (type_,) = rng.choices(list(weights), list(weights.values()))
        question, template = rng.choice(self._get_question_wordings("train")[type_])
        world = rng.randint(1, _LESSON_WORLDS)
        mode: dict[str, Any] = {"mode": "good"} if easy else {}
        return self._problem("train", question, template, world=world, hide=self.held_out, **mode)

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        fields = problem.fields
        view = GraphView(load_world_graph(), world=fields["world"], hide=fields["hide"])
        modes = MIX[fields["type"]]
        drawn = random.Random(f"kg/mode/{seed}")
        (mode,) = drawn.choices(list(modes), list(modes.values()))
        return next_turn(
            fields,
            fields.get("mode", mode),
            observations,
            random.Random(f"kg/turn/{seed}/{len(turns)}"),
            relations=[view.relation_name(relation) for relation in view.relations],
            guess=lambda rng: _sample_unseen_answer(view, fields, rng),
        )

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        if self.files is not None:
            raise NotImplementedError("task.files: questions from files have no demonstrations")
        environment = KgEnvironment()
        state = environment.reset(problem.fields, seed)
        turns: list[str] = []
        observations: list[str] = []
        while len(turns) < _MAX_DEMONSTRATION_TURNS:
            turns.append(self.act(problem, turns, observations, seed))
            step = environment.step(state, Action(text=turns[-1], number=len(turns)))
            if step.done:
                break
            state = step.state
            observations.append(step.observation)
        return Demonstration(tuple(turns))

    def _get_question_wordings(self, split: Split) -> Mapping[Type, tuple[_Asked, ...]]:
        every = self.answers == "every"
        return _build_question_wordings(self.held_out, every, split, tuple(self.types))

    def _problem(
        self,
        split: Split,
        question: KgQuestion,
        template: str,
        *,
        world: int,
        hide: float,
        **more: Any,
    ) -> Problem:
        view = GraphView(load_world_graph(), world=world, hide=hide)
        text = format_question(view, question, template)
        found = [[view.label(e), *view.aliases(e)] for e in question.answers]
        counted = question.type == "count"
        fields = {
            "question": text,
            "answers": [[str(len(found))]] if counted else found,
            "any_of": self.answers == "one" and not counted,
            "type": question.type,
            "data_source": "kg.world",
            "world": world,
            "hide": hide,
            "split": split,
            "start": [view.label(entity) for entity in question.starts],
            "chain": [[d, view.relation_name(relation)] for d, relation in question.chain],
            **more,
        }
        if counted:
            fields["evidence"] = found
        id_ = f"kg/{world}/{text.removesuffix(' ?')}"
        prompt = fill_prompt(self.prompt, text, fields["start"])
        return Problem(id=id_, prompt=prompt, fields=fields, stratum=question.type)


def _sample_unseen_answer(view: GraphView, fields: Mapping[str, Any], rng: random.Random) -> str:
    if fields["type"] == "count":
        return str(rng.randint(1, 9))
    answer = view.entity(fields["answers"][0][0])
    kind = "" if answer is None else view.kind(answer)
    return view.label(rng.choice([e for e in view.entities if view.kind(e) == kind]))


@lru_cache(maxsize=8)
def _build_question_wordings(
    share: float, every: bool, split: Split, types: tuple[Type, ...]
) -> Mapping[Type, tuple[_Asked, ...]]:
    wordings = {}
    for type_, questions in build_question_population(load_world_graph(), share)[split].items():
        wordings[type_] = tuple(
            (q, t) for q in questions for t in list_question_templates(q, every)
        )
        if type_ in types and not questions:
            raise ValueError(
                f"task.types: there is no {split} question of the type {type_!r}; "
                "leave it out, or change `held_out`"
            )
    return wordings


@lru_cache(maxsize=16)
def _build_round_slots(
    weights: tuple[tuple[Type, float], ...], seed: int
) -> Sequence[tuple[Type, int, int]]:
    """The type of each problem of a round, its rank among that type, and the type's quota: the
    integer part of its share, at least one; the largest remainders get the rest."""
    total = reduce(add, (weight for _, weight in weights))  # `sum` depends on the Python
    shares = {type_: _ROUND * weight / total for type_, weight in weights}
    quotas = {type_: max(1, int(share)) for type_, share in shares.items()}
    rest = sorted(shares, key=lambda type_: quotas[type_] - shares[type_])
    while sum(quotas.values()) != _ROUND:
        lacking = _ROUND - sum(quotas.values())
        for type_ in rest[:lacking] if lacking > 0 else rest[lacking:]:
            quotas[type_] += 1 if lacking > 0 else -1
    types = [type_ for type_, quota in quotas.items() for _ in range(quota)]
    random.Random(f"kg/types/{seed}").shuffle(types)
    ranks = {type_: count() for type_ in quotas}
    return [(type_, next(ranks[type_]), quotas[type_]) for type_ in types]


# Questions from files, in the format of RoG on the Hugging Face hub, for WebQSP and CWQ ----------

_LEVEL = 1
"""Compression level: the fastest. Facts share few names, so it already saves nine tenths."""


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
