"""Plain rows: what a trainer computes that shares no prefix, in as good a form as there is.

Every answer and every confidence is a row of its own with all that came before it. Rows of equal
length lie in micro-batches of 8 without padding, so attention takes its causal fast path without a
mask. Logits are computed at every position or, in the lean form, only where a token learns. The
strongest form is lean and has one row for each trajectory: the tokens of an answer learn in the row
of its first confidence, and an answer has no row of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlx.learner import Ranks
from rlx.learner.engine import MakeOptimizer, TrainingEngine, build_adamw
from rlx.learner.terms import UpdateSums, UpdateTargets, policy_term
from rlx.spec import LossSpec, OptimizerSpec, RunnerSpec
from rlx.train_batch import TrainBatch

__all__ = ["ROWS", "PlainLearner", "row_batches"]

ROWS = 8
"""Rows of a micro-batch."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Whole rows of one length; the other fields are those of `rlx.learner.pack.PackedBatch`.

    Attributes:
        token_ids: `[R, T]`.
        sources: `[M]` index into `[R · T]` of the output that predicts a token.
        targets, rows, columns: `[M]`.
    """

    token_ids: Tensor
    sources: Tensor
    targets: Tensor
    rows: Tensor
    columns: Tensor

    def gather_targets(self, tensor: Tensor) -> Tensor:
        """`[M]` values of a `[B, T]` tensor at the targets."""
        return tensor[self.rows, self.columns]


def row_batches(train: TrainBatch, *, joined: bool = False) -> list[RowBatch]:
    """All rows in which a token learns, by length.

    Args:
        joined: what a row continues learns in the first row that continues it.
    """
    made = []
    lengths = train.batch.is_token.sum(dim=1)
    learns, owners = _join_rows(train) if joined else _separate_rows(train)
    for length in lengths.unique().tolist():
        chosen = ((lengths == length) & learns.any(dim=1)).nonzero()[:, 0]
        for rows in chosen.split(ROWS) if len(chosen) else ():
            ids = train.batch.token_ids[rows, :length]
            row, column = learns[rows, :length].nonzero(as_tuple=True)
            targets, owner = ids[row, column], owners[rows[row], column]
            made.append(RowBatch(ids, row * length + column - 1, targets, owner, column))
    return made


def _separate_rows(train: TrainBatch) -> tuple[Tensor, Tensor]:
    """`[B, T]` which tokens of a row learn in it, and the row whose loss each token has."""
    wanted = train.wanted
    return wanted, torch.arange(len(wanted))[:, None].expand_as(wanted)


def _join_rows(train: TrainBatch) -> tuple[Tensor, Tensor]:
    """The same, where a row's tokens learn in the first row that continues it, if there is one."""
    wanted, owners = train.wanted.clone(), _separate_rows(train)[1].clone()
    places = {(row.tree, row.segment): number for number, row in enumerate(train.batch.rows)}
    for number, row in enumerate(train.batch.rows):
        above = places.get((row.tree, row.parent))
        if above is not None and wanted[above].any():
            moved = wanted[above].clone()
            owners[number, moved] = above
            wanted[number] |= moved
            wanted[above] = False
    return wanted, owners


class PlainRows(nn.Module):
    """The model asked row by row.

    Args:
        lean: logits only where a token learns.
    """

    def __init__(self, model: PreTrainedModel, *, lean: bool) -> None:
        super().__init__()
        self.model = model
        self._lean = lean

    def forward(self, rows: RowBatch) -> tuple[Tensor, Tensor]:
        """`[M]` and `[M]`: log-probability of each target, and entropy, without a gradient."""
        if self._lean:
            hidden = self.model.get_decoder()(rows.token_ids, use_cache=False).last_hidden_state
            hidden = hidden.flatten(0, 1).index_select(0, rows.sources)
            logprobs = torch.log_softmax(self.model.get_output_embeddings()(hidden), dim=-1)
        else:
            logits = self.model(rows.token_ids, use_cache=False).logits
            logprobs = torch.log_softmax(logits, dim=-1).flatten(0, 1)
            logprobs = logprobs.index_select(0, rows.sources)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(1, rows.targets[:, None])[:, 0], entropy


class PlainLearner:
    """Takes the steps of `rlx.learner.Learner` with its engine and its loss, from plain rows."""

    def __init__(
        self,
        model: PreTrainedModel,
        runner: RunnerSpec,
        optimizer: OptimizerSpec,
        ranks: Ranks,
        make_optimizer: MakeOptimizer = build_adamw,
        *,
        lean: bool = False,
        joined: bool = False,
    ) -> None:
        self._joined = joined
        self._engine = TrainingEngine(
            PlainRows(model, lean=lean),
            optimizer,
            runner,
            ranks,
            section="optimizer",
            make_optimizer=make_optimizer,
        )

    def update(self, train: TrainBatch, loss: LossSpec, rate: float) -> float:
        """Takes one optimiser step and returns the loss."""
        sums = UpdateSums()

        def term(rows: RowBatch) -> Tensor:
            return policy_term(
                *self._engine(rows), UpdateTargets.from_packed(rows, train, loss), loss, sums
            )

        batches = row_batches(train, joined=self._joined)
        self._engine.step(_Share(batches), term, rate)
        sums.read_kept()
        return sums.loss


class _Share:
    """Micro-batches under the protocol of `rlx.learner.pack.RankMicroBatches`."""

    def __init__(self, batches: list[RowBatch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[RowBatch]:
        return iter(self._batches)
