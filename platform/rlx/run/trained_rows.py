"""The record of a step's training rows, and the token streams that can be read from it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.errors import RegistryError
from rlx.record import TrainedRows, get_stored_score_name
from rlx.train_batch import TokenStreams, TrainBatch
from rlx_registry import STREAMS


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
    per_token: dict[str, Tensor | None] = {}
    for stream in (stream for stream in STREAMS.values() if stream.is_stored):
        values = train.find_stream(stream.name)
        if values is not None and stream.shape == "[B]":
            row_scores[stream.stored_name] = values
        elif values is not None and stream.shape == "[B, S + 1]":
            per_token[stream.stored_name] = spread_step_values(streams.optional["step_ids"], values)
        elif stream.shape != "[B]":
            per_token[stream.stored_name] = values
    return TrainedRows(
        [(r.tree, r.segment, r.parent, r.kind, r.level) for r in batch.rows],
        batch.group_ids,
        batch.is_own,
        per_token,
        row_scores,
    )


def read_token_streams(
    rows: TrainedRows,
    batch: TokenBatch,
    kept: Tensor,
    *,
    recomputed: Mapping[str, Tensor],
    beta: float,
    state: Mapping[str, float],
) -> TokenStreams:
    """The token streams of recorded rows.

    Args:
        rows: the record.
        batch: some of the recorded rows, `[B, T]`.
        kept: `[B]` index of each row of `batch` in the record.
        recomputed: streams that replace recorded ones, by name.
        beta, state: as in `TokenStreams`.

    Raises:
        RegistryError: the step was recorded without the log-probabilities of the old policy.
    """
    width = batch.is_own.shape[1]
    old = rows.tokens["old_logprobs"]
    if old is None:
        raise RegistryError("the step was recorded without old_logprobs")
    found: dict[str, Tensor] = {}
    for stream in (one for one in STREAMS.values() if one.is_stored and one.is_optional):
        columns = rows.scores if stream.shape == "[B]" else rows.tokens
        values = columns.get(stream.stored_name)
        if values is None:
            continue
        found[stream.name] = values[kept] if stream.shape == "[B]" else values[kept][:, :width]
        if stream.dtype == "int64":
            found[stream.name] = torch.where(batch.is_own, found[stream.name], -1)
        if stream.shape == "[B, S + 1]":
            found[stream.name] = collect_state_values(found["step_ids"], found[stream.name])
    return TokenStreams(
        old_logprobs=old[kept][:, :width],
        optional={**found, **recomputed},
        beta=beta,
        state=state,
    )
