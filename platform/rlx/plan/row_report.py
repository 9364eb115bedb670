"""The account of a row: what each of its tokens got, and from which rewards.

One type for rollouts that were made up and for rollouts that a run has stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from rlx.batch import BatchRow
from rlx.credit import place_rewards
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import Author, Pieces, RolloutTree
from rlx.spec import CreditSpec

__all__ = [
    "ContextStretch",
    "RewardAccount",
    "RowAccount",
    "RowAccountBuilder",
    "TokenLine",
    "TokenStretch",
    "TurnAccount",
    "describe_row_kind",
    "place_named_rewards",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """One token of a row.

    Attributes:
        position: in the row, from 0.
        token: its id.
        text: its own share of the row's text; a special token's name.
        author: who wrote it.
        turn: number of its turn, from 1; None between turns.
        learns: whether it is in the mask.
        placed: reward on it by name, where that is not 0; they add up to what was placed.
        kl: nats from the reference policy; None without one.
        reward: what the estimator saw, KL included; None where that was not kept.
        advantage: 0 outside the mask.
        weight: in the step's loss.
        old_logprob: nats under the policy that counts as old.
        reference_logprob, value, target: nats under the reference policy, the critic's estimate,
            and what the critic learns to predict; None where there is none.
    """

    position: int
    token: int
    text: str
    author: Author
    turn: int | None
    learns: bool
    placed: Mapping[str, float]
    kl: float | None
    reward: float | None
    advantage: float
    weight: float
    old_logprob: float
    reference_logprob: float | None
    value: float | None
    target: float | None


@dataclass(frozen=True, slots=True)
class ContextStretch:
    """A stretch that stands before the row's own tokens, or a turn that the row continues."""

    author: Author
    kind: str
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class RewardAccount:
    """One named reward of a row: of a turn, or of the whole rollout (`turn` is None)."""

    name: str
    turn: int | None
    raw: float | None
    weight: float
    status: str
    reason: str | None
    counts: bool


@dataclass(frozen=True, slots=True)
class TurnAccount:
    """A turn of a row.

    Attributes:
        number: in the rollout, from 1.
        kind: what it was.
        advantage: mean over its tokens that learn; 0 without any.
    """

    number: int
    kind: str
    finish_reason: str
    advantage: float


@dataclass(frozen=True, slots=True)
class TokenStretch:
    """Tokens of a row that belong together.

    Attributes:
        kind: of the turn that they are; "environment" for what it was answered.
        number: of the turn; None for others.
        tokens: at least one.
    """

    kind: str
    number: int | None
    tokens: tuple[TokenLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAccount:
    """One row, token by token.

    Attributes:
        row: in the batch, from 0; `parent` is the row that this one continues, or None.
        tree: its prompt's number, from 0.
        group: rows with equal numbers are compared.
        kind: what its last turn is.
        level: 0 where it continues a prompt.
        problem: id of the problem.
        score: mean(turn) + Σ global.
        lost: reward that lies on no token; None where that was not kept.
        finish_reason: of its last turn.
        turns: its own, in order; with an environment there may be several.
        context: what the model saw before.
        rewards: named, of every turn of the row and of the whole.
        tokens: from the row's first own token to its end.
    """

    row: int
    parent: int | None
    tree: int
    group: int
    kind: str
    level: int
    problem: str
    score: float | None
    lost: float | None
    finish_reason: str
    turns: tuple[TurnAccount, ...]
    context: tuple[ContextStretch, ...]
    rewards: tuple[RewardAccount, ...]
    tokens: tuple[TokenLine, ...]

    @property
    def advantage(self) -> float:
        """Mean over the tokens that learn; 0 without any."""
        return _mean_advantage(self.tokens)

    @property
    def gradient_weight(self) -> float:
        """Σ weight · |advantage|: how much of the step's first gradient the row can claim."""
        return sum(abs(t.weight * t.advantage) for t in self.tokens)

    @property
    def stretches(self) -> tuple[TokenStretch, ...]:
        """All of its tokens, turn by turn."""
        kinds = {turn.number: turn.kind for turn in self.turns}
        cut = [(number, tuple(lines)) for number, lines in groupby(self.tokens, lambda t: t.turn)]
        return tuple(
            TokenStretch(lines[0].author if number is None else kinds[number], number, lines)
            for number, lines in cut
        )


def _mean_advantage(tokens: Sequence[TokenLine]) -> float:
    learned = [t.advantage for t in tokens if t.learns]
    return sum(learned) / len(learned) if learned else 0.0


def describe_row_kind(rows: Sequence[BatchRow] | Sequence[RowAccount]) -> str:
    """What rows that may be compared are called: by the kind of their turns, or rollouts."""
    kinds = {row.kind for row in rows}
    alone = all(len(row.turns) == 1 for row in rows)
    return kinds.pop() if alone and len(kinds) == 1 else "rollout"


@dataclass(frozen=True, eq=False, kw_only=True)
class RowAccountBuilder:
    """All that the accounts of a batch are made from.

    Attributes:
        rows: where each comes from.
        groups: `[B]` int64 rows with equal numbers are compared.
        trees: whose turns they are.
        table: their rewards.
        tokens: `[B, T]` by the names of `rlx.record.rollouts.TOKEN_COLUMNS`; None, or no such name,
            where there is none.
        named: `[B, T]` of `components`.
        lost: `[B]` reward on no token; None where that was not kept.
    """

    rows: Sequence[BatchRow]
    groups: Tensor
    trees: Sequence[RolloutTree]
    table: RewardTable
    tokens: Mapping[str, Tensor | None]
    named: Mapping[str, Tensor]
    lost: Tensor | None = None

    def account(self, number: int, pieces: Pieces) -> RowAccount:
        """The account of one row."""
        row = self.rows[number]
        tree = self.trees[row.tree]
        path = tree.path(row.segment)
        first = path.index(row.turns[0])
        context = tuple(
            ContextStretch(
                s.author, s.kind, len(s.token_ids), s.text or "".join(pieces(s.token_ids))
            )
            for s in (tree.segments[i] for i in path[:first])
        )
        lines = tuple(self._lines(number, path[first:], pieces))
        turns = []
        for turn in (tree.segments[i] for i in row.turns):
            advantage = _mean_advantage([line for line in lines if line.turn == turn.turn])
            turns.append(TurnAccount(turn.turn, turn.kind, turn.finish_reason, advantage))
        return RowAccount(
            row=number,
            parent=self._parent(row),
            tree=row.tree,
            group=int(self.groups[number]),
            kind=row.kind,
            level=row.level,
            problem=tree.problem.id,
            score=self.table.total_score(row.tree, row.turns),
            lost=None if self.lost is None else float(self.lost[number]),
            finish_reason=tree.segments[row.segment].finish_reason,
            turns=tuple(turns),
            context=context,
            rewards=tuple(_list_row_rewards(row, tree, self.table)),
            tokens=lines,
        )

    def _parent(self, row: BatchRow) -> int | None:
        above = (row.tree, row.parent)
        return next((i for i, r in enumerate(self.rows) if (r.tree, r.segment) == above), None)

    def _lines(self, number: int, path: Sequence[int], pieces: Pieces) -> Iterator[TokenLine]:
        row = self.rows[number]
        tree = self.trees[row.tree]
        columns = {k: v[number].tolist() for k, v in self.tokens.items() if v is not None}
        named = {name: placed[number].tolist() for name, placed in self.named.items()}
        at = len(tree.token_ids(row.segment)) - sum(len(tree.segments[i].token_ids) for i in path)
        for index in path:
            segment = tree.segments[index]
            turn = segment.turn if index in row.turns else None
            for token, text in zip(segment.token_ids, pieces(segment.token_ids), strict=True):
                said = {name: values[at] for name, values in columns.items()}
                yield TokenLine(
                    position=at,
                    token=token,
                    text=text,
                    author=segment.author,
                    turn=turn,
                    learns=bool(said["mask"]),
                    placed={name: values[at] for name, values in named.items() if values[at]},
                    kl=said.get("kl"),
                    reward=said.get("token_rewards"),
                    advantage=said["advantages"],
                    weight=said["weights"],
                    old_logprob=said["old_logprobs"],
                    reference_logprob=said.get("reference_logprobs"),
                    value=said.get("values"),
                    target=said.get("returns"),
                )
                at += 1


def _list_row_rewards(row: BatchRow, tree: RolloutTree, table: RewardTable) -> list[RewardAccount]:
    turns = [(tree.segments[s].turn, table.turns.get((row.tree, s), {})) for s in row.turns]
    whole = table.rollouts.get((row.tree, row.segment), {})
    places: list[tuple[int | None, Mapping[str, RewardEntry]]] = [*turns, (None, whole)]
    return [
        RewardAccount(e.name, turn, e.raw, e.weight, e.status, e.reason, e.is_summed)
        for turn, entries in places
        for e in entries.values()
    ]


# Rewards by name -------------------------------------------------------------------------------


def place_named_rewards(
    rows: Sequence[BatchRow],
    trees: Sequence[RolloutTree],
    table: RewardTable,
    turn_present: Tensor,
    turn_ids: Tensor,
    mask: Tensor,
    credit: CreditSpec,
) -> dict[str, Tensor]:
    """Each named reward as it was placed on tokens, weighted: `[B, T]` by name.

    Placement is linear in the rewards, so the parts add up to the whole.

    Args:
        rows: of the batch.
        trees: whose turns they are.
        table: their rewards.
        turn_present: `[B, K]` bool, as for the whole.
        turn_ids: `[B, T]` of the batch.
        mask: `[B, T]` bool tokens that learn.
        credit: how rewards are placed.
    """
    turns: dict[str, Tensor] = {}
    overall: dict[str, Tensor] = {}
    for b, row in enumerate(rows):
        for segment in row.turns:
            at = trees[row.tree].segments[segment].turn - 1
            for name, value in _list_weighted_rewards(table.turns.get((row.tree, segment), {})):
                turns.setdefault(name, torch.zeros(turn_present.shape))[b, at] = value
        for name, value in _list_weighted_rewards(table.rollouts.get((row.tree, row.segment), {})):
            overall.setdefault(name, torch.zeros(len(rows)))[b] = value
    none, nothing = torch.zeros(turn_present.shape), torch.zeros(len(rows))
    return {
        name: place_rewards(
            turns.get(name, none),
            turn_present,
            overall.get(name, nothing),
            turn_ids,
            mask,
            placement=credit.resolved_placement,
            turn_reduce=credit.turn_reduce,
            on_missing_turn=credit.on_missing_turn,
        ).token_rewards
        for name in dict.fromkeys((*turns, *overall))
    }


def _list_weighted_rewards(entries: Mapping[str, RewardEntry]) -> list[tuple[str, float]]:
    return [
        (e.name, e.weight * e.raw) for e in entries.values() if e.is_summed and e.raw is not None
    ]
