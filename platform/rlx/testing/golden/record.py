"""Records of worked examples, with tolerant lookup of their input names."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
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
    "read_golden_records",
    "sum_named_rewards",
]


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

    Raises:
        SpecError: the file cannot be read or has another form.
    """
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
                f"{path}: record {number} is no object with 'id' and 'outputs'; "
                "the form is that of golden.json"
            )
        parts = {key: value for key, value in example.items() if key in known and value is not None}
        records.append(GoldenRecord(**{"inputs": {}, **parts}))
    tolerances = {key: float(whole[key]) for key in ("rtol", "atol") if key in whole}
    return GoldenRecords(tuple(records), **tolerances)


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
