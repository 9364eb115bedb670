"""The task `dataset`: problems from data files, mapped from their records by YAML options."""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlx.plugin import Demonstration, Plugin, Problem, Split
from rlx_plugins.answer_text import format_number
from rlx_plugins.records import Source, Stamp, convert_to_plain_json, get_value_at_path
from rlx_plugins.templates import fill_template, list_template_fields

_Placed = list[tuple[str, Problem]]
_Splits = Mapping[Split, tuple[Problem, ...]]


class Dataset(Plugin):
    """Problems from JSONL or Parquet files, or from a Hugging Face dataset.

    Training problems are shuffled by the seed in every pass; test problems keep the file order. All
    records are read and checked before the first problem is returned. A prompt may be a list of
    chat messages, `[{role, content}]`: one user message, optionally preceded by a system message.
    Two problems are duplicates if their system messages and prompts are equal.
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
    """Template over the fields, such as `"{question}\\n"`; `{{` is a brace."""
    system: str | None = None
    """The field that holds a system message."""
    stratum: str | None = None
    """The field that holds a coarse label of difficulty."""
    id: str | None = None
    """The field that identifies problems; by default a hash of their content."""
    allow_control_tokens: bool = False
    """Whether names of control tokens in prompts and system messages, such as `<|im_end|>`, become
    control tokens. By default a space breaks them up: `< |im_end|>`."""
    demonstrations: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Templates over the fields, one per turn of a demonstration, for warm starts."""

    @field_validator("prompt", "demonstrations")
    @classmethod
    def _check_templates(cls, value: Any) -> Any:
        for template in (value,) if isinstance(value, str) else value or ():
            list_template_fields(template)
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.test is None) == (self.held_out is None):
            raise ValueError("needs either `test` or `held_out`, the share to keep for testing")
        if self.fields is None:
            return self
        used = {"prompt": list_template_fields(self.prompt)}
        used["demonstrations"] = [
            n for t in self.demonstrations or () for n in list_template_fields(t)
        ]
        used |= {o: [n] for o in ("system", "stratum", "id") if (n := getattr(self, o)) is not None}
        for option, names in used.items():
            for name in names:
                if name not in self.fields:
                    there = ", ".join(self.fields)
                    raise ValueError(f"{option} names {name!r}, but `fields` has only {there}")
        return self

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index` of a split; the same for the same arguments.

        Raises:
            OSError, ImportError, ValueError: as `check`.
        """
        problems = self._splits()[split]
        passes, position = divmod(index, len(problems))
        if split == "train":
            position = _shuffle_dataset_indices(seed, passes, len(problems))[position]
        return problems[position]

    @property
    def demonstrates(self) -> bool:
        """Whether there are demonstrations, which `warm_start` needs."""
        return self.demonstrations is not None

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns the demonstration in the record.

        Raises:
            NotImplementedError: the option `demonstrations` is not set.
        """
        if self.demonstrations is None:
            raise NotImplementedError("task.demonstrations says which fields show a worked episode")
        return _build_demonstration(self.demonstrations, problem.fields)

    def check(self) -> None:
        """Reads all records.

        Raises:
            OSError, ImportError: this machine lacks a file, a dataset or a package.
            ValueError: a record does not fit the options, or the splits share a problem; the
                message names the file and the line or row.
        """
        self._splits()

    def _splits(self) -> _Splits:
        stamps = self.train.stamps() + (self.test.stamps() if self.test else ())
        return _load_dataset_splits(self.model_dump_json(), stamps)


@lru_cache(maxsize=4)
def _load_dataset_splits(options: str, stamps: tuple[Stamp, ...]) -> _Splits:
    """Both splits, read once per process and state of the files."""
    task = Dataset.model_validate_json(options)
    train = _read_source_problems(task, task.train)
    if task.test is not None:
        test = _read_source_problems(task, task.test)
        train = _remove_tested_problems(train, test, task.duplicates)
    else:
        train, test = _split_held_out(train, task.held_out or 0.0)
    for split, problems in (("train", train), ("test", test)):
        if not problems:
            source = task.test if split == "test" and task.test is not None else task.train
            raise ValueError(
                f"{_name_source(source)}: no problem is left for the split {split!r}; records with "
                "equal prompts count once, and held-out problems are not trained on"
            )
    if task.id is not None:
        _check_ids([*train, *test])
    return {"train": tuple(p for _, p in train), "test": tuple(p for _, p in test)}


def _read_source_problems(task: Dataset, source: Source) -> _Placed:
    made = []
    for where, record in source.rows():
        try:
            made.append((where, _build_problem_from_record(task, record)))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if not made:
        raise ValueError(f"{_name_source(source)}: holds no record")
    return made


def _name_source(source: Source) -> str:
    return source.hub or ", ".join(map(str, source.paths))


def _build_problem_from_record(task: Dataset, record: Mapping[str, Any]) -> Problem:
    mapping = task.fields or {name: name for name in record}
    fields = {name: _get_field_value(record, path) for name, path in mapping.items()}
    chat, prompt = _fill_prompt(task.prompt, fields)
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    system = _get_field_label(fields, task.system)
    if chat and system:
        raise ValueError(f"the prompt has a system message, and so has {task.system!r}")
    if task.demonstrations is not None:
        _build_demonstration(task.demonstrations, fields)
    own = _written([chat or system, prompt, fields])
    return Problem(
        id=_compute_text_hash(own).hex()[:16]
        if task.id is None
        else _get_field_label(fields, task.id),
        prompt=prompt,
        fields=fields,
        stratum=_get_field_label(fields, task.stratum),
        system=chat or system,
        allow_control_tokens=task.allow_control_tokens,
    )


def _get_field_value(record: Mapping[str, Any], path: str) -> Any:
    value = get_value_at_path(record, path)
    try:
        return convert_to_plain_json(value)
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from None


def _get_field_label(fields: Mapping[str, Any], name: str | None) -> str:
    """The text of a field; "" if no field is named, or if it is null."""
    if name is None or get_value_at_path(fields, name) is None:
        return ""
    return _format_field_text(name, fields[name])


def _build_demonstration(templates: Iterable[str], fields: Mapping[str, Any]) -> Demonstration:
    return Demonstration(
        tuple(
            fill_template(
                t,
                {
                    n: _format_field_text(n, get_value_at_path(fields, n))
                    for n in list_template_fields(t)
                },
            )
            for t in templates
        )
    )


# Templates ---------------------------------------------------------------------------------------


def _fill_prompt(template: str, fields: Mapping[str, Any]) -> tuple[str, str]:
    """System message of a chat, "" without one, and the prompt."""
    texts, system = {}, ""
    for name in list_template_fields(template):
        value = get_value_at_path(fields, name)
        if isinstance(value, list):
            system, texts[name] = _split_chat_messages(name, value)
        else:
            texts[name] = _format_field_text(name, value)
    return system, fill_template(template, texts)


def _format_field_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name!r} must be text or a number, got {_format_short_repr(value)}")
    return format_number(value)


def _split_chat_messages(name: str, messages: list[Any]) -> tuple[str, str]:
    """The system and the user message of a chat."""
    pairs = [
        (m.get("role"), m.get("content")) if isinstance(m, Mapping) else (None, None)
        for m in messages
    ]
    roles = [role for role, _ in pairs]
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(
            f"{name!r} must be text, or one user message with perhaps a system message before it, "
            f"got {_format_short_repr(roles if any(roles) else messages)}"
        )
    texts = [
        _format_field_text(f"{name}.{i}.content", content) for i, (_, content) in enumerate(pairs)
    ]
    return ("" if len(texts) == 1 else texts[0]), texts[-1]


def _format_short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# Which problem in which split --------------------------------------------------------------------


_written = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def _compute_text_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _compute_prompt_hash(problem: Problem) -> bytes:
    """A hash of system message and prompt, equal for duplicates."""
    return _compute_text_hash(f"{len(problem.system)} {problem.system}{problem.prompt}")


def _compute_split_position(problem: Problem) -> float:
    """A number in [0, 1), uniform over problems and equal for duplicates."""
    return int.from_bytes(_compute_prompt_hash(problem)[:6]) / 2**48


def _split_held_out(problems: _Placed, share: float) -> tuple[_Placed, _Placed]:
    """Splits off a share of the problems for testing."""
    train: _Placed = []
    test: _Placed = []
    for where, problem in problems:
        (test if _compute_split_position(problem) < share else train).append((where, problem))
    return train, test


def _remove_tested_problems(
    train: _Placed, test: _Placed, duplicates: Literal["refuse", "drop"]
) -> _Placed:
    """The training problems without those of the test split.

    Raises:
        ValueError: the splits share a problem, and `duplicates` is "refuse".
    """
    tested = {_compute_prompt_hash(problem): where for where, problem in test}
    shared = [
        (where, at) for where, p in train if (at := tested.get(_compute_prompt_hash(p))) is not None
    ]
    if shared and duplicates == "refuse":
        where, at = shared[0]
        raise ValueError(
            f"{where}: also in the test split, at {at}; so are {len(shared)} of {len(train)} "
            "training problems. `duplicates: drop` leaves them out of training"
        )
    return [
        (where, problem) for where, problem in train if _compute_prompt_hash(problem) not in tested
    ]


def _check_ids(problems: _Placed) -> None:
    first: dict[str, str] = {}
    for where, problem in problems:
        if not problem.id:
            raise ValueError(f"{where}: its id is empty")
        if problem.id in first:
            raise ValueError(
                f"{where}: its id {problem.id!r} is also that of {first[problem.id]}; without the "
                "option `id`, problems are identified by their content"
            )
        first[problem.id] = where


@lru_cache(maxsize=4)
def _shuffle_dataset_indices(seed: int, passes: int, size: int) -> list[int]:
    return random.Random(f"dataset/{seed}/pass {passes}").sample(range(size), size)
