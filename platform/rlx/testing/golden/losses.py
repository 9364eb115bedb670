"""Losses: surrogates, sequence ratios, and the aggregation of token losses."""

import re
from typing import Any

import torch
from torch import Tensor

from rlx.loss import aggregation_weights, clipped_surrogate, sequence_log_ratio
from rlx.spec import Aggregate
from rlx.testing.golden.family import RecordFamily
from rlx.testing.golden.record import GoldenRecord

__all__ = ["AGGREGATION", "GSPO", "SURROGATE"]


def _get_clip_range(record: GoldenRecord) -> tuple[float, float]:
    low = record.get("clip_low", "clip_ratio_low", "clip")
    return low, record.get("clip_high", "clip_ratio_high", default=low)


def _compute_surrogate_losses(record: GoldenRecord, name: str) -> Tensor:
    bound = "trl_delta" if "delta" in name else "dual_clip_c"
    return clipped_surrogate(
        record.tokens("ratio").log(),
        record.tokens("advantages"),
        clip=_get_clip_range(record),
        dual_clip=record.get(bound, "dual_clip", "dual_clip_c"),
    )


def _aggregate_losses(
    losses: Tensor, mask: Tensor, aggregate: Aggregate, length: float = 1.0
) -> float:
    """Σ weight · loss; masked tokens may have any loss."""
    weights = aggregation_weights(
        mask,
        torch.zeros(len(mask), dtype=torch.int64),
        aggregate=aggregate,
        per_turn=False,
        constant_lengths=torch.full((len(mask),), float(length)),
    )
    return float((weights * torch.where(mask, losses, 0.0)).sum())


def _surrogate_loss(record: GoldenRecord, name: str) -> float:
    return _aggregate_losses(_compute_surrogate_losses(record, name), record.mask(), "token_mean")


SURROGATE = RecordFamily(
    frozenset({"g26"}),
    lambda r: r.has("ratio") and r.has("advantages"),
    {
        "token_loss.*": lambda r, n: _compute_surrogate_losses(r, n).tolist(),
        "loss.*": _surrogate_loss,
    },
)

_RULES: tuple[tuple[str, Aggregate], ...] = (
    ("token_?sum_?norm|constant|dr_?grpo|fixed|max_?len", "constant"),
    ("token_?sum", "sequence_sum"),
    ("seq.*token_?mean|^(loss_)?grpo|sequence_?mean|seq_?mean", "sequence_mean"),
    ("token_?mean|bnpo|dapo|token", "token_mean"),
)
_LENGTHS = ("constant", "max_len", "max_length", "L", "norm", "loss_scale_factor", "const", "C")


def _compute_aggregate_output(record: GoldenRecord, name: str) -> float:
    plain = name.lower().replace("-", "_")
    aggregate = next(rule for pattern, rule in _RULES if re.search(pattern, plain))
    losses, mask = record.tokens("token_loss", "token_losses", "loss", "losses"), record.mask()
    length = 1.0
    if aggregate == "constant":
        length = float(record.get(*_LENGTHS))
        if "sum_norm" in plain:
            # The record sums over rows; rlx takes the mean.
            length /= int(mask.any(dim=1).sum())
    return _aggregate_losses(losses, mask, aggregate, length)


AGGREGATION = RecordFamily(
    frozenset({"g27"}),
    lambda r: r.has("token_loss", "token_losses", "losses"),
    {f".*({'|'.join(pattern for pattern, _ in _RULES)}).*": _compute_aggregate_output},
)


def _compute_gspo_output(record: GoldenRecord, name: str) -> Any:
    mask = record.mask()
    rows = mask.nonzero()[:, 0]
    tokens = sequence_log_ratio(record.tokens("log_ratio")[mask], rows)
    # All tokens of a row have equal values; keep one per row.
    held = rows.unique()
    log_ratio = tokens[torch.searchsorted(rows, held)]
    if name == "seq_ratio":
        return log_ratio.exp().tolist()
    losses = clipped_surrogate(
        log_ratio, record.tensor("advantages")[held], clip=_get_clip_range(record), dual_clip=None
    )
    if name == "seq_loss":
        return losses.tolist()
    one_each = torch.ones(len(losses), 1, dtype=torch.bool)
    return _aggregate_losses(losses[:, None], one_each, "sequence_mean")


GSPO = RecordFamily(
    frozenset({"g34"}),
    lambda r: r.has("log_ratio"),
    {"seq_ratio|seq_loss|loss": _compute_gspo_output},
)
