"""The task `dataset`: problems from data files, mapped from their records by YAML options."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlx.plugin import Demonstration, Message, Plugin, Problem, Split, StrictModel
from rlx_plugins.answer_text import format_number
from rlx_plugins.records import Source, Stamp, convert_to_plain_json, get_value_at_path
from rlx_plugins.templates import fill_template, list_template_fields

_Placed = list[tuple[str, Problem]]
_Splits = Mapping[Split, _Placed]


class MessageTemplate(StrictModel):
    """A message of a prompt; its content is a template over the fields."""

    role: Literal["system", "user", "assistant"]
    content: str


class Dataset(Plugin):
    """Problems from JSONL or Parquet files, or from a Hugging Face dataset.

    Training problems are shuffled by the seed in every pass; test problems keep the file order. All
    records are read and checked before the first problem is returned. A prompt is text or a list of
    chat messages, `[{role, content}]`, in the record or in `prompt`: perhaps a system message, then
    user and assistant in turns, the user last. Two problems are duplicates if their messages are
    equal.
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
    prompt: str | Annotated[tuple[MessageTemplate, ...], Field(min_length=1)] = "{prompt}"
    """Template over the fields, such as `"{question}\\n"`, or messages whose contents are
    templates; `{{` is a brace. Where a field holds messages, the template is filled with the
    last."""
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
            list_template_fields(getattr(template, "content", template))
        return value

    @field_validator("prompt")
    @classmethod
    def _check_roles(cls, value: Any) -> Any:
        if not isinstance(value, str) and (wrong := _describe_roles([m.role for m in value])):
            raise ValueError(wrong)
        return value

    @field_validator("prompt")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else [message.content for message in value]
        if not any(list_template_fields(text) for text in texts):
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
        texts = [self.prompt] if isinstance(self.prompt, str) else [m.content for m in self.prompt]
        used = {"prompt": [name for text in texts for name in list_template_fields(text)]}
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
        return problems[position][1]

    def list_problems(self) -> Iterator[tuple[str, Problem]]:
        """Yields every problem of both splits, and where it was read.

        Raises:
            OSError, ImportError, ValueError: as `check`.
        """
        for placed in self._splits().values():
            yield from placed

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

    def data(self) -> Mapping[str, str]:
        """Returns digests of the records of each file."""
        test = self.test.digests("test") if self.test else {}
        return {**self.train.digests("train"), **test}

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
    return {"train": train, "test": test}


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
    chat, history, prompt = _fill_prompt(task.prompt, fields)
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    system = _get_field_label(fields, task.system)
    if chat and system:
        raise ValueError(f"the prompt has a system message, and so has {task.system!r}")
    if task.demonstrations is not None:
        _build_demonstration(task.demonstrations, fields)
    earlier = [[message.content for message in history]] if history else []
    own = _written([chat or system, *earlier, prompt, fields])
    return Problem(
        id=_compute_text_hash(own).hex()[:16]
        if task.id is None
        else _get_field_label(fields, task.id),
        prompt=prompt,
        fields=fields,
        stratum=_get_field_label(fields, task.stratum),
        system=chat or system,
        history=history,
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


def _fill_prompt(
    prompt: str | Sequence[MessageTemplate], fields: Mapping[str, Any]
) -> tuple[str, tuple[Message, ...], str]:
    """The system message, "" without one, the messages after it, and the prompt."""
    if not isinstance(prompt, str):
        return _split_messages([(m.role, _fill_text(m.content, fields)) for m in prompt])
    system, history = "", tuple[Message, ...]()
    texts = {}
    for name in list_template_fields(prompt):
        value = get_value_at_path(fields, name)
        if isinstance(value, list):
            system, history, texts[name] = _split_messages(_read_messages(name, value))
        else:
            texts[name] = _format_field_text(name, value)
    return system, history, fill_template(prompt, texts)


def _fill_text(template: str, fields: Mapping[str, Any]) -> str:
    names = list_template_fields(template)
    return fill_template(
        template, {n: _format_field_text(n, get_value_at_path(fields, n)) for n in names}
    )


def _format_field_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name!r} must be text or a number, got {_format_short_repr(value)}")
    return format_number(value)


def _describe_roles(roles: Sequence[str]) -> str:
    """Says what is wrong with the order of a prompt's messages; "" if nothing is."""
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if list(spoken) == ["user", "assistant"] * (len(spoken) // 2) + ["user"]:
        return ""
    return (
        "messages are perhaps one of the system, then user and assistant in turns, the user first "
        f"and last; got {', '.join(roles) or 'none'}"
    )


def _read_messages(name: str, messages: Sequence[Any]) -> list[tuple[Any, str]]:
    """The role and the text of every message in a field.

    Raises:
        ValueError: they are no messages, or have another order than a prompt's.
    """
    if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError(
            f"{name!r} must be text, or messages with a role and a content, "
            f"got {_format_short_repr(messages)}"
        )
    if wrong := _describe_roles([m["role"] for m in messages]):
        raise ValueError(f"{name!r}: {wrong}")
    return [
        (m["role"], _format_field_text(f"{name}.{i}.content", m.get("content")))
        for i, m in enumerate(messages)
    ]


def _split_messages(
    messages: Sequence[tuple[Any, str]],
) -> tuple[str, tuple[Message, ...], str]:
    """The system message, "" without one, the messages after it, and the last, a user's."""
    system = messages[0][1] if messages[0][0] == "system" else ""
    spoken = messages[1:] if messages[0][0] == "system" else messages
    return system, tuple(Message(role, text) for role, text in spoken[:-1]), spoken[-1][1]


def _format_short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# Which problem in which split --------------------------------------------------------------------


_written = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def _compute_text_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _compute_prompt_hash(problem: Problem) -> bytes:
    """A hash of the messages, equal for duplicates."""
    earlier = "".join(f"{len(m.content)} {m.content}" for m in problem.history)
    return _compute_text_hash(f"{len(problem.system)} {problem.system}{earlier}{problem.prompt}")


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
