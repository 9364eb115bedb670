"""The policy loss of a whole batch with its gradient, by the keys of `loss:`."""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import TypeAdapter

from rlx.errors import SpecError
from rlx.loss import aggregation_weights, compute_token_losses, select_covariant_tokens
from rlx.spec import LossSpec
from rlx.testing.golden.values import parse_tensor

__all__ = ["INPUTS", "OPTIONS", "compute_policy_loss"]

INPUTS = ("logprobs", "old_logprobs", "advantages", "mask", "choice_logprobs", "lengths")
OPTIONS = ("ratio", "surrogate", "clip", "dual_clip", "temperatures", "ratio_cap", "aggregate")
"""Those that the listing shows; any other key of `loss` that concerns the surrogate may be set."""


def compute_policy_loss(inputs: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`value`, the loss without penalties, and `gradient`, `[B, T]` by the log-probabilities.

    Args:
        inputs: `logprobs`, `old_logprobs`, `advantages` and `mask`, `[B, T]`; `choice_logprobs`
            from which `covariance` chooses, by default the old ones; `lengths` `[B]` for
            `aggregate: constant`.
        options: keys of `loss`.

    Raises:
        SpecError: an input is missing or unknown.
    """
    if unknown := sorted(inputs.keys() - set(INPUTS)):
        raise SpecError(f"{unknown[0]!r} is none of a loss's inputs: {', '.join(INPUTS)}")
    if missing := [name for name in INPUTS[:4] if name not in inputs]:
        raise SpecError(f"a loss needs {', '.join(missing)}")
    spec = TypeAdapter(LossSpec).validate_python(dict(options))
    given = {name: parse_tensor(name, value) for name, value in inputs.items()}
    logprobs, old, advantages, mask = (given[name] for name in INPUTS[:4])
    logprobs = logprobs.clone().requires_grad_()
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
    )
    value = (weights[mask] * losses).sum()
    (gradient,) = torch.autograd.grad(value, logprobs)
    return {"value": value.item(), "gradient": gradient.tolist()}
