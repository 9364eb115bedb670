"""Token batches built from rollout trees, and the index and mask conventions.

Letters used for shapes, here and in every docstring of the package:
    B  rows: one per trained sample
    T  token positions, padded on the right
    K  turns of a row, the first at index 0

An answer is a row. A confidence is a row whose context is its own answer; only its own tokens are
trained on. A trajectory with an environment is one row with all of its turns.

Index convention: position t of every tensor describes token t. The log-probability of token t
given the tokens before it is stored at t, never at t - 1.

Mask convention: a mask is named after what True means, and True keeps the token.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.errors import ShapeError
from rlx.rollout import NO_PARENT, RolloutTree

NO_TURN = -1


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Where a row comes from.

    Attributes:
        tree: position of its tree in the step.
        segment: the policy segment that it ends with.
        turns: its own policy segments, in order; their tokens are the row's own tokens.
        parent: the policy segment of the same tree that the row continues; `NO_PARENT` for none.
        kind: kind of its last turn.
        level: 0 when it continues a prompt, 1 when it continues a level-0 row, and so on.
    """

    tree: int
    segment: int
    turns: tuple[int, ...]
    parent: int
    kind: str
    level: int


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch:
    """Rollouts as rows of tokens. Built by `build_token_batch` and never modified.

    Attributes:
        rows: where each row comes from, `B` of them.
        token_ids: `[B, T]` int64 tokens the model saw; 0 on padding.
        is_token: `[B, T]` bool False on padding.
        is_own: `[B, T]` bool True where the policy wrote the token as part of this row.
        is_environment: `[B, T]` bool True where an environment wrote it between the row's turns.
        is_end: `[B, T]` bool True on the last token of a turn that stopped by itself.
        turn_ids: `[B, T]` int64 number of the turn within its trajectory, from 1, where `is_own`;
            `NO_TURN` elsewhere.
        spans: for every span name `[B, T]` bool True on its tokens, tags included, where `is_own`.
        contents: as `spans`, without the tags.
        is_hull: `[B, T]` bool True from the first span of each turn to its last, see
            `rlx.rollout.find_hull`, where `is_own`.
        behaviour_logprobs: `[B, T]` float32 nats, under the distribution that the token was
            sampled from; 0 where not `is_own`.
        temperatures: `[B, T]` float32 of the sampler, where `is_own`; 1 elsewhere.
        group_ids: `[B]` int64 rows with equal ids continue the same prompt segment and can be
            compared.
        levels: `[B]` int64 as `BatchRow.level`.
        tree_ids: `[B]` int64 as `BatchRow.tree`.
        state_ids: `[B, K]` int64 state in which turn number k (at k - 1) began. Within a tree,
            equal ids are the same state: the environment's `info["state"]`, or else the tokens
            that opened the turn. `NO_TURN` where the row has no such turn of its own.
    """

    rows: tuple[BatchRow, ...]
    token_ids: Tensor
    is_token: Tensor
    is_own: Tensor
    is_environment: Tensor
    is_end: Tensor
    turn_ids: Tensor
    spans: Mapping[str, Tensor]
    contents: Mapping[str, Tensor]
    is_hull: Tensor
    behaviour_logprobs: Tensor
    temperatures: Tensor
    group_ids: Tensor
    levels: Tensor
    tree_ids: Tensor
    state_ids: Tensor

    @property
    def is_confidence(self) -> Tensor:
        """`[B]` bool rows that judge an answer: those of kind `confidence`, and all below the rows
        of kind `answer`, or else below the first level."""
        answer = max((row.level for row in self.rows if row.kind == "answer"), default=0)
        return torch.tensor([row.kind == "confidence" or row.level > answer for row in self.rows])

    @property
    def is_response(self) -> Tensor:
        """`[B, T]` bool from the row's first own token to its end, whoever wrote the tokens."""
        return self.is_token & (self.is_own.cumsum(dim=1) > 0)


def list_batch_rows(trees: Sequence[RolloutTree]) -> list[BatchRow]:
    """The rows of every tree, in tree order, then in order of their last segment."""
    rows = []
    for position, tree in enumerate(trees):
        own_turns = {index: tree.own_turns(index) for index in tree.policy_segments}
        continued = {turn for own, _ in own_turns.values() for turn in own[:-1]}
        level_of: dict[int, int] = {NO_PARENT: -1}
        for index, (own, parent) in own_turns.items():
            level_of[index] = level_of[parent] + 1
            if index not in continued:
                kind = tree.segments[index].kind
                rows.append(BatchRow(position, index, own, parent, kind, level_of[index]))
    return rows


def build_token_batch(
    trees: Sequence[RolloutTree],
    *,
    temperatures: Mapping[str, float] | None = None,
    without: Collection[tuple[int, int]] = (),
) -> TokenBatch:
    """Flattens trees into a batch of rows, in the order of `list_batch_rows`.

    Args:
        temperatures: sampling temperature of each kind of turn; 1 for kinds not listed.
        without: (tree, segment) of rows to leave out, such as those that could not be scored.

    Raises:
        ShapeError: no row is left.
    """
    rows = [row for row in list_batch_rows(trees) if (row.tree, row.segment) not in without]
    if not rows:
        raise ShapeError("cannot batch zero rollouts")
    length = max(trees[row.tree].count_tokens(row.segment) for row in rows)
    names = sorted({name for tree in trees for s in tree.segments for name in s.spans})
    sheet = _BatchBuffer((len(rows), length), names)
    for b, row in enumerate(rows):
        sheet.write(b, row, trees[row.tree], temperatures or {})
    return TokenBatch(
        rows=tuple(rows),
        **sheet.fields(),
        group_ids=_assign_group_ids(trees, rows),
        levels=torch.tensor([row.level for row in rows]),
        tree_ids=torch.tensor([row.tree for row in rows]),
        state_ids=_assign_state_ids(trees, rows),
    )


class _BatchBuffer:
    """The `[B, T]` fields of a batch under construction, as NumPy arrays: slices are cheap."""

    def __init__(self, shape: tuple[int, int], names: Sequence[str]) -> None:
        self.token_ids = np.zeros(shape, dtype=np.int64)
        self.is_token, self.is_own = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        self.is_environment, self.is_end = np.zeros_like(self.is_own), np.zeros_like(self.is_own)
        self.is_hull = np.zeros_like(self.is_own)
        self.turn_ids = np.full(shape, NO_TURN)
        self.spans = {name: np.zeros(shape, dtype=bool) for name in names}
        self.contents = {name: np.zeros(shape, dtype=bool) for name in names}
        self.behaviour_logprobs = np.zeros(shape, dtype=np.float32)
        self.temperatures = np.ones(shape, dtype=np.float32)

    def fields(self) -> dict[str, Any]:
        return {
            name: {k: torch.from_numpy(v) for k, v in value.items()}
            if isinstance(value, dict)
            else torch.from_numpy(value)
            for name, value in vars(self).items()
        }

    def write(
        self, b: int, row: BatchRow, tree: RolloutTree, temperatures: Mapping[str, float]
    ) -> None:
        start = 0
        for index in tree.path(row.segment):
            segment = tree.segments[index]
            here = slice(start, start := start + len(segment.token_ids))
            self.token_ids[b, here] = segment.token_ids
            self.is_token[b, here] = True
            if index not in row.turns:
                between = segment.author == "environment" and index > row.turns[0]
                self.is_environment[b, here] = between
                continue
            self.is_own[b, here] = True
            self.is_end[b, here.stop - 1] = segment.finish_reason == "stop"
            self.turn_ids[b, here] = segment.turn
            self.behaviour_logprobs[b, here] = segment.logprobs
            self.temperatures[b, here] = temperatures.get(segment.kind, 1.0)
            if segment.hull is not None:
                first, last = segment.hull
                self.is_hull[b, here.start + first : here.start + last] = True
            for name, span in segment.spans.items():
                for field, (first, last) in ((self.spans, span.outer), (self.contents, span.inner)):
                    field[name][b, here.start + first : here.start + last] = True


def _assign_group_ids(trees: Sequence[RolloutTree], rows: Sequence[BatchRow]) -> Tensor:
    """`[B]` one id per opening prompt segment, numbered in order of appearance."""
    ids: dict[tuple[int, int], int] = {}
    opened = [(row.tree, _find_opening(trees[row.tree], row.turns[0])) for row in rows]
    return torch.tensor([ids.setdefault(place, len(ids)) for place in opened])


def _find_opening(tree: RolloutTree, turn: int) -> int:
    """The prompt segment before a first turn; observations may lie between them (self-play)."""
    segment = tree.segments[turn].parent
    while segment != NO_PARENT and tree.segments[segment].author == "environment":
        segment = tree.segments[segment].parent
    return segment


def _assign_state_ids(trees: Sequence[RolloutTree], rows: Sequence[BatchRow]) -> Tensor:
    """`[B, K]` as `TokenBatch.state_ids`, numbered in order of appearance."""
    ids: dict[Any, int] = {}
    turns = max(trees[row.tree].segments[turn].turn for row in rows for turn in row.turns)
    states = torch.full((len(rows), turns), NO_TURN)
    for b, row in enumerate(rows):
        segments = trees[row.tree].segments
        for turn in row.turns:
            opening = segments[segments[turn].parent]
            state = (row.tree, opening.info.get("state", opening.token_ids))
            states[b, segments[turn].turn - 1] = ids.setdefault(state, len(ids))
    return states
