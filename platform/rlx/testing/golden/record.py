"""Records of worked examples, with tolerant lookup of their input names."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlx.errors import SpecError

__all__ = [
    "GoldenRecord",
    "GoldenRecords",
    "MissingInputError",
    "assign_integer_ids",
    "read_countdown_cases",
    "read_golden_records",
    "sum_named_rewards",
]


_CASE_KEYS = {"id", "response", "numbers", "target", "expected"}


class MissingInputError(LookupError):
    """The record has no input with any of these names."""


@dataclass(frozen=True)
class GoldenRecord:
    """One worked example. A calculation reads `inputs` and `config`, never `outputs`."""

    id: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    section: str = ""
    title: str = ""
    notes: str = ""

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these names found in inputs, then config. Case is ignored; `-` equals `_`.

        Raises:
            MissingInputError: no name is found and there is no default.
        """
        known = {
            _normalize_input_name(key): value
            for key, value in (*self.config.items(), *self.inputs.items())
        }
        for name in names:
            if _normalize_input_name(name) in known:
                return known[_normalize_input_name(name)]
        if default is not None:
            return default
        raise MissingInputError(f"no {' or '.join(names)} among its inputs")

    def has(self, *names: str) -> bool:
        """Whether inputs or config contain any of these names."""
        return bool(
            {_normalize_input_name(n) for n in names}
            & {_normalize_input_name(k) for k in (*self.config, *self.inputs)}
        )

    def tensor(self, *names: str) -> Tensor:
        """float64, in the shape of the input."""
        return torch.tensor(self.get(*names), dtype=torch.float64)

    def tokens(self, *names: str) -> Tensor:
        """float64 `[B, T]`; a single row may omit the batch dimension."""
        tokens: Tensor = torch.atleast_2d(self.tensor(*names))
        return tokens

    def mask(self) -> Tensor:
        """`[B, T]` bool tokens that count."""
        names = ("loss_mask", "response_mask", "mask", "eos_mask", "action_mask")
        mask: Tensor = self.tokens(*names) != 0
        return mask

    def groups(self, count: int) -> Tensor:
        """`[B]` group ids; without any, all rows form one group."""
        names = self.get(
            "uid", "uids", "group_ids", "groups", "group", "index", default=[0] * count
        )
        return assign_integer_ids(names)

    @property
    def searchable_text(self) -> str:
        """All text that describes the record."""
        return f"{self.title} {self.section} {json.dumps(self.config)}".lower()


@dataclass(frozen=True)
class GoldenRecords:
    """The records of a file, with their tolerances."""

    examples: tuple[GoldenRecord, ...]
    rtol: float = 1e-6
    atol: float = 1e-9


def read_golden_records(path: Path) -> GoldenRecords:
    """Reads `{version, rtol, atol, examples: [...]}`, a bare list of records, or one record.

    A file `*.jsonl` holds scored Countdown answers instead, one per line; see
    `read_countdown_cases`.

    Raises:
        SpecError: the file cannot be read or has another form.
    """
    if path.suffix == ".jsonl":
        return GoldenRecords(tuple(read_countdown_cases(path)))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read as JSON: {error}") from error
    whole = content if isinstance(content, dict) and "examples" in content else {}
    examples = whole.get("examples", content if isinstance(content, list) else [content])
    known = set(GoldenRecord.__dataclass_fields__)
    records = []
    for number, example in enumerate(examples, start=1):
        if not isinstance(example, dict) or not {"id", "outputs"} <= set(example):
            raise SpecError(
                f"{path}: record {number} is not an object with 'id' and 'outputs'; "
                "use the format of golden.json"
            )
        parts = {key: value for key, value in example.items() if key in known and value is not None}
        records.append(GoldenRecord(**{"inputs": {}, **parts}))
    tolerances = {key: float(whole[key]) for key in ("rtol", "atol") if key in whole}
    return GoldenRecords(tuple(records), **tolerances)


def read_countdown_cases(path: Path) -> Iterator[GoldenRecord]:
    """Yields one record per line `{id, response, numbers, target, expected, expected_source}`.

    `expected` is the score by the default rule, and `expected_source` the score by TinyZero's own
    rule, where the two differ.

    Raises:
        SpecError: the file cannot be read, or a line is no such case.
    """
    try:
        # Not `splitlines`: a response may hold a line separator of Unicode.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except ValueError as error:
            raise SpecError(f"{path} line {number}: not JSON: {error}") from None
        lacking = sorted(_CASE_KEYS - set(case)) if isinstance(case, dict) else sorted(_CASE_KEYS)
        if lacking:
            raise SpecError(f"{path} line {number}: a Countdown case also needs {lacking[0]!r}")
        yield GoldenRecord(
            id=str(case["id"]),
            title=str(case.get("note", "")),
            section=str(case.get("category", "")),
            inputs={
                "responses": [case["response"]],
                "numbers": case["numbers"],
                "target": case["target"],
            },
            outputs={
                "scores": [case["expected"]],
                "source_scores": [case.get("expected_source", case["expected"])],
            },
        )


def assign_integer_ids(names: Iterable[Any]) -> Tensor:
    """`[B]` int64 ids, equal for equal names; names are strings or numbers."""
    seen: dict[str, int] = {}
    return torch.tensor([seen.setdefault(str(name), len(seen)) for name in names])


def sum_named_rewards(
    rewards: Mapping[str, float] | Sequence[float] | float, exclude: str = "_"
) -> float:
    """Σ of named rewards; names with the prefix `exclude` are left out, "" leaves none out."""
    if isinstance(rewards, int | float):
        return float(rewards)
    if not isinstance(rewards, Mapping):
        return float(sum(rewards))
    kept = (v for k, v in rewards.items() if not exclude or not k.startswith(exclude))
    return float(sum(kept))


def _normalize_input_name(name: str) -> str:
    """Unifies spellings such as `Epsilon` and `eps`, `high-level-gamma` and `high_level_gamma`."""
    plain = re.sub(r"[\s_-]+", "", name.lower())
    return {"epsilon": "eps", "lambda": "lam"}.get(plain, plain)
