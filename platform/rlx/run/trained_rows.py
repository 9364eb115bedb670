"""The record of a step's training rows, and the token streams that can be read from it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.errors import RegistryError
from rlx.record import TrainedRows, get_stored_score_name
from rlx.train_batch import TokenStreams, TrainBatch

__all__ = [
    "build_trained_rows",
    "collect_state_values",
    "read_token_streams",
    "spread_step_values",
]


def spread_step_values(step_ids: Tensor, values: Tensor) -> Tensor:
    """`[B, T]` value of the state in which each token's step begins; 0 without a step."""
    known = step_ids >= 0
    return torch.where(known, values.gather(1, step_ids.clamp(min=0)), 0.0)


def collect_state_values(step_ids: Tensor, per_token: Tensor) -> Tensor:
    """Recovers the `[B, S + 1]` values from the result of `spread_step_values`.

    This is possible because every step has tokens and the value of the last state is 0.
    """
    steps = int(step_ids.max()) + 1
    nowhere = torch.where(step_ids < 0, steps + 1, step_ids)
    values = per_token.new_zeros(len(step_ids), steps + 2)
    return values.scatter(1, nowhere, per_token)[:, : steps + 1]


def build_trained_rows(train: TrainBatch) -> TrainedRows:
    """Builds the record of a step's training rows."""
    batch, streams, scores = train.batch, train.streams, train.scores
    row_scores = {get_stored_score_name(name): values for name, values in vars(scores).items()}
    if streams.greedy_scores is not None:
        row_scores["greedy_score"] = streams.greedy_scores
    return TrainedRows(
        [(r.tree, r.segment, r.parent, r.kind, r.level) for r in batch.rows],
        batch.group_ids,
        batch.is_own,
        {
            "mask": train.mask,
            "weights": train.weights,
            "advantages": train.advantages,
            "old_logprobs": streams.old_logprobs,
            "reference_logprobs": streams.reference_logprobs,
            "values": streams.values,
            "placed": train.placed.token_rewards,
            "token_rewards": train.token_rewards,
            "kl": train.kl,
            "returns": train.returns,
            "step_ids": streams.step_ids,
            "mc_values": _token_values(streams),
        },
        row_scores,
    )


def _token_values(streams: TokenStreams) -> Tensor | None:
    if streams.step_ids is None or streams.mc_values is None:
        return None
    return spread_step_values(streams.step_ids, streams.mc_values)


def read_token_streams(
    rows: TrainedRows,
    batch: TokenBatch,
    kept: Tensor,
    *,
    greedy_scores: Tensor | None,
    beta: float,
    state: Mapping[str, float],
) -> TokenStreams:
    """The token streams of recorded rows.

    Args:
        rows: the record.
        batch: some of the recorded rows, `[B, T]`.
        kept: `[B]` index of each row of `batch` in the record.
        greedy_scores, beta, state: as in `TokenStreams`.

    Raises:
        RegistryError: the step was recorded without the log-probabilities of the old policy.
    """
    width = batch.is_own.shape[1]
    found = {
        name: None if (all_rows := rows.tokens[name]) is None else all_rows[kept][:, :width]
        for name in ("old_logprobs", "reference_logprobs", "values", "step_ids", "mc_values")
    }
    old, step_ids, values = found["old_logprobs"], found["step_ids"], found["mc_values"]
    if old is None:
        raise RegistryError("the step was recorded without old_logprobs")
    states = None
    if step_ids is not None and values is not None:
        step_ids = torch.where(batch.is_own, step_ids, -1)
        states = collect_state_values(step_ids, values)
    return TokenStreams(
        old_logprobs=old,
        reference_logprobs=found["reference_logprobs"],
        values=found["values"],
        greedy_scores=greedy_scores,
        step_ids=None if states is None else step_ids,
        mc_values=states,
        beta=beta,
        state=state,
    )
