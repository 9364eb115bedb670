"""The task `dataset`: problems from data files, mapped from their records by YAML options."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlx.plugin import Demonstration, Message, Plugin, Problem, Split
from rlx_plugins.answer_text import format_number
from rlx_plugins.records import (
    Source,
    Stamp,
    convert_to_plain_json,
    format_short_repr,
    get_value_at_path,
    pick_problem,
)
from rlx_plugins.templates import fill_template, list_template_fields

_Placed = list[tuple[str, Problem]]
_Splits = Mapping[Split, _Placed]


class Dataset(Plugin):
    """Problems from JSONL or Parquet files, or from a Hugging Face dataset.

    Training problems are shuffled by the seed in every pass; test problems keep the file order. All
    records are read and checked before the first problem is returned. In a record, a prompt is text
    or a list of chat messages, `[{role, content}]`: perhaps a system message, then user and
    assistant in turns, the user last. Two problems are duplicates if their messages are equal.
    """

    train: Source
    test: Source | None = None
    held_out: float | None = Field(None, gt=0, lt=1)
    """Without `test`: the share of `train` to hold out for testing, chosen by a hash of the
    problem's content, not by its position."""
    duplicates: Literal["refuse", "drop"] = "refuse"
    """How to handle training problems that are also test problems."""
    fields: Annotated[Mapping[str, str], Field(min_length=1)] | None = None
    """Name of each field of a problem, and the dotted path to it in the record; by default all
    top-level fields under their own names. Rewards read them."""
    prompt: str = "{prompt}"
    """Template over the fields, such as `"{question}\\n"`; `{{` is a brace. Where a field holds
    messages, the template is filled with the last."""
    stratum: str | None = None
    """The field that holds a coarse label of difficulty."""
    demonstrations: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Templates over the fields, one per turn of a demonstration, for warm starts."""

    @field_validator("prompt", "demonstrations")
    @classmethod
    def _check_templates(cls, value: Any) -> Any:
        for template in (value,) if isinstance(value, str) else value or ():
            list_template_fields(template)
        return value

    @field_validator("prompt")
    @classmethod
    def _check_fields(cls, value: str) -> str:
        if not list_template_fields(value):
            raise ValueError(
                "it names no field, so all problems would be alike; a field stands in single "
                "braces, such as {question}"
            )
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.test is None) == (self.held_out is None):
            raise ValueError("needs either `test` or `held_out`, the share to keep for testing")
        if self.fields is None:
            return self
        used = {
            "prompt": list_template_fields(self.prompt),
            "demonstrations": [
                n for t in self.demonstrations or () for n in list_template_fields(t)
            ],
            "stratum": [] if self.stratum is None else [self.stratum],
        }
        for option, names in used.items():
            for name in names:
                if name not in self.fields:
                    there = ", ".join(self.fields)
                    raise ValueError(f"{option} names {name!r}, but `fields` has only {there}")
        return self

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return pick_problem(self._splits()[split], split, index, f"dataset/{seed}")[1]

    def list_problems(self) -> Iterator[tuple[str, Problem]]:
        for placed in self._splits().values():
            yield from placed

    @property
    def demonstrates(self) -> bool:
        return self.demonstrations is not None

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        if self.demonstrations is None:
            raise NotImplementedError("task.demonstrations says which fields show a worked episode")
        return _build_demonstration(self.demonstrations, problem.fields)

    def check(self) -> None:
        self._splits()

    def data(self) -> Mapping[str, str]:
        test = self.test.digests("test") if self.test else {}
        return {**self.train.digests("train"), **test}

    def _splits(self) -> _Splits:
        stamps = self.train.stamps() + (self.test.stamps() if self.test else ())
        return _load_dataset_splits(self.model_dump_json(), stamps)


@lru_cache(maxsize=4)
def _load_dataset_splits(options: str, stamps: tuple[Stamp, ...]) -> _Splits:
    """Both splits, read once per process and state of the files."""
    task = Dataset.model_validate_json(options)
    read = _read_source_problems(task, task.train)
    if task.test is not None:
        test = _read_source_problems(task, task.test)
    else:
        below = (task.held_out or 0.0) * 2**48
        test = [one for one in read if int.from_bytes(_compute_prompt_hash(one[1])[:6]) < below]
    tested = {_compute_prompt_hash(problem): where for where, problem in test}
    train = [one for one in read if _compute_prompt_hash(one[1]) not in tested]
    if task.test is not None and task.duplicates == "refuse" and len(train) < len(read):
        where, at = next(
            (w, tested[h]) for w, p in read if (h := _compute_prompt_hash(p)) in tested
        )
        raise ValueError(
            f"{where}: also in the test split, at {at}; so are {len(read) - len(train)} of "
            f"{len(read)} training problems. `duplicates: drop` leaves them out of training"
        )
    for split, problems in (("train", train), ("test", test)):
        if not problems:
            source = task.test if split == "test" and task.test is not None else task.train
            raise ValueError(
                f"{source.name}: no problem is left for the split {split!r}; records with "
                "equal prompts count once, and held-out problems are not trained on"
            )
    return {"train": train, "test": test}


def _read_source_problems(task: Dataset, source: Source) -> _Placed:
    made = [*source.parse_rows(lambda record: _build_problem_from_record(task, record))]
    if not made:
        raise ValueError(f"{source.name}: holds no record")
    return made


def _build_problem_from_record(task: Dataset, record: Mapping[str, Any]) -> Problem:
    fields = {}
    for name, path in (task.fields or {name: name for name in record}).items():
        value = get_value_at_path(record, path)
        try:
            fields[name] = convert_to_plain_json(value)
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None
    system, history, prompt = _fill_prompt(task.prompt, fields)
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if task.demonstrations is not None:
        _build_demonstration(task.demonstrations, fields)
    stratum = ""
    if task.stratum is not None and get_value_at_path(fields, task.stratum) is not None:
        stratum = _format_field_text(task.stratum, fields[task.stratum])
    earlier = [[message.content for message in history]] if history else []
    return Problem(
        id=hashlib.sha256(_written([system, *earlier, prompt, fields]).encode()).hexdigest()[:16],
        prompt=prompt,
        fields=fields,
        stratum=stratum,
        system=system,
        history=history,
    )


def _build_demonstration(templates: Iterable[str], fields: Mapping[str, Any]) -> Demonstration:
    turns = []
    for template in templates:
        names = list_template_fields(template)
        texts = {n: _format_field_text(n, get_value_at_path(fields, n)) for n in names}
        turns.append(fill_template(template, texts))
    return Demonstration(tuple(turns))


def _fill_prompt(prompt: str, fields: Mapping[str, Any]) -> tuple[str, tuple[Message, ...], str]:
    system, history = "", tuple[Message, ...]()
    texts = {}
    for name in list_template_fields(prompt):
        value = get_value_at_path(fields, name)
        if isinstance(value, list):
            system, history, texts[name] = _read_messages(name, value)
        else:
            texts[name] = _format_field_text(name, value)
    return system, history, fill_template(prompt, texts)


def _format_field_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name!r} must be text or a number, got {format_short_repr(value)}")
    return format_number(value)


def _read_messages(name: str, messages: Sequence[Any]) -> tuple[str, tuple[Message, ...], str]:
    """The system message in a field, "" without one, the messages after it, and the last."""
    if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError(
            f"{name!r} must be text, or messages with a role and a content, "
            f"got {format_short_repr(messages)}"
        )
    roles = [m["role"] for m in messages]
    begin = int(roles[:1] == ["system"])
    if roles[begin:] != ["user", "assistant"] * ((len(roles) - begin) // 2) + ["user"]:
        raise ValueError(
            f"{name!r}: messages are perhaps one of the system, then user and assistant in turns, "
            f"the user first and last; got {', '.join(roles) or 'none'}"
        )
    texts = [
        _format_field_text(f"{name}.{i}.content", m.get("content")) for i, m in enumerate(messages)
    ]
    spoken = zip(roles[begin:-1], texts[begin:-1], strict=True)
    return texts[0] if begin else "", tuple(Message(*one) for one in spoken), texts[-1]


_written = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def _compute_prompt_hash(problem: Problem) -> bytes:
    """A hash of the messages, equal for duplicates."""
    earlier = "".join(f"{len(m.content)} {m.content}" for m in problem.history)
    whole = f"{len(problem.system)} {problem.system}{earlier}{problem.prompt}"
    return hashlib.sha256(whole.encode()).digest()
