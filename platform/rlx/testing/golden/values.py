"""Conversion between the JSON of a record and the arguments and results of functions."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.batch import NO_TURN, TokenBatch
from rlx.credit import CreditInputs
from rlx.errors import SpecError
from rlx.plugin import Sample
from rlx_registry import STREAMS

__all__ = [
    "build_credit_inputs",
    "build_mask_batch",
    "build_samples",
    "list_input_names",
    "parse_tensor",
    "unpack_result",
]

_BOOLEANS = ("mask", "contents", "turn_present")
_CREDIT_FIELDS = tuple(field.name for field in fields(CreditInputs) if field.name != "streams")
_STREAM_OUTPUTS = tuple(sorted({stream.name for stream in STREAMS.values() if stream.is_output}))
_PLAIN = ("reward_weights", "score_source", "state")
_INTEGERS = ("rows", "kinds", "lengths", "levels", "slot")


def list_input_names() -> dict[str, list[str]]:
    """Names of the inputs of estimators, masks and rewards; those left out are neutral."""
    return {
        "credit inputs": [*_CREDIT_FIELDS, *_STREAM_OUTPUTS],
        "a batch": [field.name for field in fields(TokenBatch)],
        "a sample": [field.name for field in fields(Sample)],
    }


def parse_tensor(name: str, value: Any) -> Tensor:
    """An array of a record, or a tensor, as the tensor that an argument of this name takes.

    Masks and `is_*` become bool, ids, levels and counts int64, everything else float64. Ids may be
    text, which is numbered in order of appearance. null in a number is NaN.

    Raises:
        SpecError: it is no array of one shape.
    """
    if isinstance(value, Tensor):
        return value
    try:
        if name in _BOOLEANS or name.startswith("is_"):
            return torch.tensor(value, dtype=torch.float64) != 0
        if name.endswith("_ids"):
            return torch.tensor(_number_ids(value, {}), dtype=torch.int64)
        if name in _INTEGERS:
            return torch.tensor(value, dtype=torch.int64)
        return torch.tensor(_replace_nulls(value), dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{name}: {error}") from error


def _number_ids(value: Any, seen: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_number_ids(each, seen) for each in value]
    return seen.setdefault(value, len(seen)) if isinstance(value, str) else value


def _replace_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_nulls(each) for each in value]
    return float("nan") if value is None else value


def build_credit_inputs(inputs: Mapping[str, Any]) -> CreditInputs:
    """The inputs of an estimator, from those that a record gives.

    What is left out is neutral: one token per row, one turn that covers the mask, one group, no
    rewards. A null in `turn_rewards` is a turn that was not rewarded.

    Raises:
        SpecError: nothing tells the number of rows, or a name is unknown.
    """
    known = [*_CREDIT_FIELDS, *_STREAM_OUTPUTS]
    if unknown := sorted(inputs.keys() - set(known)):
        raise SpecError(f"{unknown[0]!r} is none of an estimator's inputs: {', '.join(known)}")
    named: dict[str, Any] = {
        name: value if name in _PLAIN else parse_tensor(name, value)
        for name, value in inputs.items()
        if value is not None
    }
    rows = next((len(value) for value in named.values() if isinstance(value, Tensor)), None)
    if rows is None:
        raise SpecError("an estimator needs at least one input with a value per row")
    mask = named.setdefault("mask", torch.ones(rows, 1, dtype=torch.bool))
    rewards = named.setdefault("turn_rewards", torch.zeros(rows, 0, dtype=torch.float64))
    named.setdefault("turn_present", ~rewards.isnan())
    named["turn_rewards"] = rewards.nan_to_num(0.0)
    groups = named.setdefault("group_ids", torch.zeros(rows, dtype=torch.int64))
    defaults: dict[str, Any] = {
        "global_rewards": torch.zeros(rows, dtype=torch.float64),
        "token_rewards": torch.zeros(mask.shape, dtype=torch.float64),
        "turn_ids": torch.where(mask, 1, NO_TURN),
        "levels": torch.zeros(rows, dtype=torch.int64),
        "tree_ids": groups,
        "state_ids": torch.full(rewards.shape, NO_TURN),
    }
    streams = {name: named.pop(name) for name in _STREAM_OUTPUTS if name in named}
    return CreditInputs(**{**defaults, **named}, streams=streams)


def build_mask_batch(inputs: Mapping[str, Any]) -> TokenBatch:
    """A batch for a mask strategy, from `is_own` and what else a record gives.

    What is left out is neutral: no environment, no end, no span, one turn.

    Raises:
        SpecError: `is_own` is missing, or a name is unknown.
    """
    known = [field.name for field in fields(TokenBatch)]
    if unknown := sorted(inputs.keys() - set(known)):
        raise SpecError(f"{unknown[0]!r} is none of a mask's inputs: {', '.join(known)}")
    if "is_own" not in inputs:
        raise SpecError("a mask needs `is_own`, [B, T]")
    named: dict[str, Any] = {
        name: {span: parse_tensor("is_span", tokens) for span, tokens in value.items()}
        if isinstance(value, dict)
        else parse_tensor(name, value)
        for name, value in inputs.items()
    }
    own = named["is_own"]
    nothing, rows = torch.zeros_like(own), torch.arange(len(own))
    defaults = {
        "rows": (),
        "token_ids": torch.zeros(own.shape, dtype=torch.int64),
        "is_token": torch.ones_like(own),
        **dict.fromkeys(("is_environment", "is_end", "is_hull"), nothing),
        "turn_ids": torch.where(own, 1, NO_TURN),
        "spans": {},
        "contents": {},
        "behaviour_logprobs": torch.zeros(own.shape),
        "temperatures": torch.ones(own.shape),
        "group_ids": torch.zeros_like(rows),
        "levels": torch.zeros_like(rows),
        "tree_ids": rows,
        "state_ids": torch.zeros(len(rows), 1, dtype=torch.int64),
    }
    return TokenBatch(**{**defaults, **named})


def build_samples(inputs: Mapping[str, Any]) -> Sample | tuple[Sample, ...]:
    """What a reward scores: one sample, or several of a wider scope under `samples`.

    Raises:
        SpecError: a name is unknown.
    """
    if "samples" in inputs:
        return tuple(_build_sample(each, f"s{n}") for n, each in enumerate(inputs["samples"]))
    return _build_sample(inputs, "s")


def _build_sample(inputs: Mapping[str, Any], id: str) -> Sample:
    known = [field.name for field in fields(Sample)]
    if unknown := sorted(inputs.keys() - set(known)):
        raise SpecError(f"{unknown[0]!r} is none of a sample's fields: {', '.join(known)}")
    defaults = {"id": id, "problem": {}, "turn": "answer", "number": 1, "response": ""}
    return Sample(**{**defaults, **inputs})


def unpack_result(result: Any) -> dict[str, Any]:
    """A function's result as outputs by name: the fields of a record, or else `value`."""
    if is_dataclass(result) and not isinstance(result, type):
        return {field.name: _unpack_value(getattr(result, field.name)) for field in fields(result)}
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        return {name: _unpack_value(value) for name, value in result._asdict().items()}
    return {"value": _unpack_value(result)}


def _unpack_value(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _unpack_value(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [
            unpack_result(each)
            if hasattr(each, "_asdict") or is_dataclass(each)
            else _unpack_value(each)
            for each in value
        ]
    return value
