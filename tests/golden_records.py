"""Worked examples, and the functions of rlx that they name.

A file is `{rtol, atol, examples: [...], differences: [...]}`. A record names a function of rlx, its
inputs and options, and the outputs that are expected:

    {"function": "credit.group_advantages", "inputs": {"scores": [1, 0], "group_ids": ["a", "a"]},
     "options": {"ddof": 0}, "outputs": {"value": [1, -1]}}

A function is an estimator, mask or reward by its YAML name, such as `estimators.grpo`, or a public
function of a package that holds the mathematics.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from rlx.batch import NO_TURN, TokenBatch
from rlx.credit import CreditInputs
from rlx.discovery import build_plugin
from rlx.learner.learner import UpdateSums, UpdateTargets, policy_term
from rlx.loss import aggregation_weights, compute_token_losses, select_covariant_tokens
from rlx.plugin import Placement, Sample
from rlx.spec import KlPenalty, LossSpec, PluginUse
from rlx.testing.promise import bind_subject
from rlx_registry import STREAMS


def agrees(got: Any, expected: Any, rtol: float, atol: float) -> bool:
    """Whether a value agrees with what is expected. An object agrees if every key that is expected
    does; null in a list agrees with anything: what stands outside a mask is not compared."""
    if isinstance(expected, Mapping):
        return isinstance(got, Mapping) and all(
            key in got and agrees(got[key], value, rtol, atol) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(got, list)
            and len(got) == len(expected)
            and all(
                e is None or agrees(g, e, rtol, atol) for g, e in zip(got, expected, strict=True)
            )
        )
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return got == expected or math.isclose(got, expected, rel_tol=rtol, abs_tol=atol)
    return type(got) is type(expected) and bool(got == expected)


_BOOLEANS = ("mask", "contents", "turn_present", "counted")
_STREAM_OUTPUTS = tuple(sorted({stream.name for stream in STREAMS.values() if stream.is_output}))
_PLAIN = ("reward_weights", "score_source", "state")
_INTEGERS = ("rows", "kinds", "lengths", "levels", "slot", "tokens")


def parse_tensor(name: str, value: Any) -> Tensor:
    """An array of a record as the tensor that an argument of this name takes: masks and `is_*`
    become bool, ids, levels and counts int64, everything else float64. Ids may be text, which is
    numbered in order of appearance. null in a number is NaN."""
    if isinstance(value, Tensor):
        return value
    if name in _BOOLEANS or name.startswith("is_"):
        return torch.tensor(value, dtype=torch.float64) != 0
    if name.endswith("_ids"):
        return torch.tensor(_number_ids(value, {}), dtype=torch.int64)
    if name in _INTEGERS:
        return torch.tensor(value, dtype=torch.int64)
    return torch.tensor(_replace_nulls(value), dtype=torch.float64)


def _number_ids(value: Any, seen: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_number_ids(each, seen) for each in value]
    return seen.setdefault(value, len(seen)) if isinstance(value, str) else value


def _replace_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_nulls(each) for each in value]
    return float("nan") if value is None else value


def build_credit_inputs(inputs: Mapping[str, Any]) -> CreditInputs:
    """The inputs of an estimator, from those that a record gives. What is left out is neutral; a
    null in `turn_rewards` is a turn that was not rewarded."""
    named: dict[str, Any] = {
        name: value if name in _PLAIN else parse_tensor(name, value)
        for name, value in inputs.items()
        if value is not None
    }
    rows = next(len(value) for value in named.values() if isinstance(value, Tensor))
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
    """A batch for a mask strategy, from `is_own`, `[B, T]`, and what else a record gives."""
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


def compute_outputs(record: Mapping[str, Any]) -> dict[str, Any]:
    """Calls the function of a record; its outputs by name, as JSON has them."""
    room, _, name = record["function"].partition(".")
    inputs, options = record.get("inputs", {}), record.get("options", {})
    if record["function"] == "losses.policy":
        return compute_policy_loss(inputs, options)
    if record["function"] == "losses.teacher":
        return compute_teacher_loss(inputs, options)
    if room == "estimators":
        plugin = build_plugin(PluginUse(plugin=name, **options), "estimator")
        result = bind_subject(plugin)(build_credit_inputs(inputs))
        return unpack_result(result, alone="advantages")
    if room == "masks":
        plugin = build_plugin(PluginUse(plugin=name, **options), "mask")
        return {"mask": bind_subject(plugin)(build_mask_batch(inputs)).int().tolist()}
    if room == "rewards":
        plugin = build_plugin(PluginUse(plugin=name, **options), "reward")
        return score_sample(plugin, inputs)
    function = getattr(import_module(f"rlx.{room}"), name)
    return unpack_result(function(**parse_arguments(function, inputs, options)))


def parse_arguments(
    function: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    hints = get_type_hints(function)
    arguments: dict[str, Any] = {}
    if CreditInputs in hints.values():
        arguments["inputs"], inputs = build_credit_inputs(inputs), {}
    for name, value in (*inputs.items(), *options.items()):
        if hints.get(name) is Placement:
            value = build_plugin(PluginUse(plugin=value), "placement")
        is_tensor = Tensor in (hints.get(name), *get_args(hints.get(name)))
        arguments[name] = parse_tensor(name, value) if is_tensor and value is not None else value
    return arguments


def score_sample(plugin: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a score of one sample."""
    neutral = {"id": "s", "problem": {}, "turn": "answer", "number": 1, "response": ""}
    verdict = plugin.score(Sample(**{**neutral, **inputs}))
    if verdict is None or isinstance(verdict, int | float):
        return {"value": verdict, "reason": None, "parts": {}}
    return unpack_result(verdict)


def compute_policy_loss(inputs: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`value`, the loss without penalties, and `gradient`, `[B, T]` by the log-probabilities.

    `covariance` chooses by `choice_logprobs`, or else the old ones; `counted` are rows that count
    though none of their tokens learns.
    """
    spec = TypeAdapter(LossSpec).validate_python(dict(options))
    given = {name: parse_tensor(name, value) for name, value in inputs.items()}
    logprobs, old = given["logprobs"].clone().requires_grad_(), given["old_logprobs"]
    advantages, mask = given["advantages"], given["mask"]
    covariant = None
    if spec.covariance is not None:
        choice = given.get("choice_logprobs", old)
        chosen = select_covariant_tokens(advantages, choice, mask, spec.covariance, seed=0)
        covariant = chosen[mask]
    rows = mask.nonzero()[:, 0]
    losses = compute_token_losses(
        logprobs[mask], old[mask], advantages[mask], rows, spec, covariant
    ).losses
    weights = aggregation_weights(
        mask,
        torch.zeros(len(mask), dtype=torch.int64),
        aggregate=spec.aggregate,
        per_turn=spec.per_turn,
        constant_lengths=given.get("lengths"),
        counted=given.get("counted"),
    )
    value = (weights[mask] * losses).sum()
    (gradient,) = torch.autograd.grad(value, logprobs)
    return {"value": value.item(), "gradient": gradient.tolist()}


def compute_teacher_loss(inputs: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The KL penalty alone: `value`, as a run records it, and `gradient`, `[T, V]` by the logits.
    Without sampled `tokens` every token counts with its probability, which gives the expectation
    exactly."""
    given = {name: parse_tensor(name, value) for name, value in inputs.items()}
    logits = given["logits"].clone().requires_grad_()
    logprobs, reference = logits.log_softmax(-1), given["teacher_logits"].log_softmax(-1)
    weights = logprobs.detach().exp()
    if "tokens" in given:
        at = given["tokens"][:, None]
        logprobs, reference = logprobs.gather(1, at), reference.gather(1, at)
        weights = torch.ones_like(reference)
    nothing = torch.zeros(logprobs.numel(), dtype=logits.dtype)
    targets = UpdateTargets(
        rows=torch.arange(len(nothing)),
        old=logprobs.detach().flatten(),
        advantages=nothing,
        weights=weights.flatten() / len(logits),
        bonus=nothing,
        reference=reference.flatten(),
    )
    spec, sums = LossSpec(kl=TypeAdapter(KlPenalty).validate_python(dict(options))), UpdateSums()
    loss = policy_term(logprobs.flatten(), nothing, targets, spec, sums)
    (gradient,) = torch.autograd.grad(loss, logits)
    sums.read_kept()
    return {"value": sums.totals["kl_loss"], "gradient": gradient.tolist()}


def unpack_result(result: Any, alone: str = "value") -> dict[str, Any]:
    """A function's result as outputs by name: the fields of a record, or else one value alone."""
    if is_dataclass(result) and not isinstance(result, type):
        return {field.name: _unpack_value(getattr(result, field.name)) for field in fields(result)}
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        return {name: _unpack_value(value) for name, value in result._asdict().items()}
    return {alone: _unpack_value(result)}


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


def find_differences(
    record: Mapping[str, Any], *, rtol: float = 1e-6, atol: float = 1e-9
) -> list[str]:
    """The outputs of a record that differ from those of rlx, which must have them all."""
    got = compute_outputs(record)
    return [
        f"{record['id']}: {name} is {got[name]}, not {expected}"
        for name, expected in record["outputs"].items()
        if not agrees(got[name], expected, rtol, atol)
    ]


def find_all_differences(content: Mapping[str, Any]) -> list[str]:
    """Those of all examples of a file."""
    tolerances = {key: content[key] for key in ("rtol", "atol") if key in content}
    return [d for record in content["examples"] for d in find_differences(record, **tolerances)]
