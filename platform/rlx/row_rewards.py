"""Rows of tokens with their rewards and loss mask, from rollout trees and their reward table."""

import math
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from rlx.batch import BatchRow, TokenBatch, build_token_batch, list_batch_rows
from rlx.phase_setup import PhaseSetup
from rlx.reward import RewardEntry, RewardTable, compute_mean_value
from rlx.rollout import RolloutTree
from rlx.train_batch import ScoredRows

Place = tuple[int, int]


def build_scored_rows(
    setup: PhaseSetup,
    trees: Sequence[RolloutTree],
    table: RewardTable,
    *,
    without: Collection[Place],
    mask: Tensor | None = None,
) -> ScoredRows | None:
    """Flattens trees into rows with rewards and loss mask; None if no row is left.

    Args:
        setup: the phase's temperatures and mask strategy.
        trees: the step's trees.
        table: rewards of `trees`.
        without: rows to leave out, each as `(tree, segment)` of its last turn.
        mask: `[B, T]` bool a known loss mask, instead of the strategy's.
    """
    if all((row.tree, row.segment) in without for row in list_batch_rows(trees)):
        return None
    batch = build_token_batch(trees, temperatures=setup.temperatures, without=without)
    expected = setup.spec.loss.expected
    over = "path" if expected is None else expected.over
    mask = setup.mask(batch) if mask is None else mask
    return join_row_rewards(batch, trees, table, mask, label=setup.label, over=over)


def find_lost_rows(trees: Sequence[RolloutTree], table: RewardTable) -> set[Place]:
    """Rows that were dropped or have no reward, each as `(tree, segment)` of its last turn."""
    return {
        (row.tree, row.segment)
        for row in list_batch_rows(trees)
        if (row.tree, row.segment) in table.dropped
        or table.total_score(row.tree, row.turns) is None
    }


def compute_answer_scores(
    trees: Sequence[RolloutTree], table: RewardTable, numbers: Sequence[int]
) -> Tensor:
    """`[B]` structured score of the first answer of each of these trees, by number."""
    places = [(number, trees[number].policy_segments[0]) for number in numbers]
    return torch.tensor(
        [(table.get_turn_total(p) or 0.0) + (table.get_rollout_total(p) or 0.0) for p in places]
    )


def join_row_rewards(
    batch: TokenBatch,
    trees: Sequence[RolloutTree],
    table: RewardTable,
    mask: Tensor,
    *,
    label: str | None = None,
    over: Literal["path", "prompt"] = "path",
) -> ScoredRows:
    """Sums the table's weighted rewards per row of a batch with a loss mask.

    Turn number k is at column k - 1. A missing turn reward is marked in `turn_present`, since it
    is not the same as a reward of 0. `label` names the turn reward of `CreditInputs.labels`, and
    `over` says whether it is the row's own or the mean over its prompt.
    """
    shape = tuple(batch.state_ids.shape)
    turns, present = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    whole = torch.zeros(shape[0])
    for b, row in enumerate(batch.rows):
        whole[b] = table.get_rollout_total((row.tree, row.segment)) or 0.0
        for segment in row.turns:
            total = table.get_turn_total((row.tree, segment))
            if total is not None:
                at = trees[row.tree].segments[segment].turn - 1
                turns[b, at], present[b, at] = total, True
    labels = None
    if label is not None:
        labels = torch.tensor(
            [
                _find_label(trees[r.tree], table, (r.tree, r.segment), label, over)
                for r in batch.rows
            ]
        )
    named, weights = _build_named_rewards(batch, table)
    return ScoredRows.join(
        batch,
        mask,
        turn_rewards=turns,
        turn_present=present,
        global_rewards=whole,
        labels=labels,
        named_rewards=named,
        reward_weights=weights,
    )


def _build_named_rewards(batch: TokenBatch, table: RewardTable) -> tuple[Tensor, tuple[float, ...]]:
    """`[B, N]` raw values of the named rewards that count, NaN where absent, and their weights."""
    weights: dict[tuple[str, str], float] = {}
    rows: list[dict[tuple[str, str], list[float]]] = []
    for row in batch.rows:
        found: dict[tuple[str, str], list[float]] = {}
        for scope, entry in _list_row_entries(row, table):
            if entry.is_summed and entry.raw is not None:
                weights[scope, entry.name] = entry.weight
                found.setdefault((scope, entry.name), []).append(entry.raw)
        rows.append(found)
    names = sorted(weights)
    values = [[fmean(row[name]) if name in row else math.nan for name in names] for row in rows]
    return torch.tensor(values).reshape(len(rows), len(names)), tuple(weights[n] for n in names)


def _list_row_entries(row: BatchRow, table: RewardTable) -> Iterator[tuple[str, RewardEntry]]:
    """Yields the rewards of a row's turns and of its rollout, each with its scope."""
    for segment in row.turns:
        for entry in table.turns.get((row.tree, segment), {}).values():
            yield "turn", entry
    for entry in table.rollouts.get((row.tree, row.segment), {}).values():
        yield "global", entry


def _find_label(
    tree: RolloutTree, table: RewardTable, place: Place, name: str, over: Literal["path", "prompt"]
) -> float:
    """Raw value of a turn reward at a turn or the nearest one before that has it, or its mean over
    all turns of the prompt; NaN where it is absent."""
    number, segment = place
    if over == "prompt":
        mean = compute_mean_value(tree, place, name, table.turns)
        return math.nan if mean is None else mean
    for index in reversed(tree.path(segment)):
        entry = table.turns.get((number, index), {}).get(name)
        if entry is not None and entry.raw is not None:
            return entry.raw
    return math.nan
