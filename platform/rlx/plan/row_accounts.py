"""The account of a row: the reward, advantage and weight of each token, and from which rewards;
the same for synthetic rollouts and for those that a run has stored."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlx.batch import BatchRow, TokenBatch
from rlx.credit import CreditInputs, place_rewards
from rlx.discovery import build_placement
from rlx.model import ModelDialogue
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import Author, Pieces, RolloutTree, build_piece_splitter
from rlx.spec import CreditSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """One token of a row; log-probabilities and KL are in nats. None is what the step lacks.

    Attributes:
        position: index in the row, from 0; `token` is the token's id.
        text: the token's share of the row's text; for a special token, its name.
        turn: turn number, from 1; None between turns.
        learns: whether the loss mask includes it.
        placed: non-zero rewards on the token by name; they add up to its placed reward.
        kl: against the reference policy.
        reward: token reward that the estimator read, KL included.
        advantage: 0 outside the mask; `weight` is its factor in the step's loss.
        value, target: the critic's estimate and target.
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
    """A piece of context before the row's own tokens, or a turn that the row continues."""

    author: Author
    kind: str
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class RewardAccount:
    """One named reward of a turn, or of the whole rollout if `turn` is None."""

    name: str
    turn: int | None
    raw: float | None
    weight: float
    status: str
    reason: str | None
    counts: bool


@dataclass(frozen=True, slots=True)
class TurnAccount:
    """A turn of a row, by its number in the rollout, from 1; its advantage is as a row's."""

    number: int
    kind: str
    finish_reason: str
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAccount:
    """One row, token by token.

    Attributes:
        row: index in the batch, from 0; `parent` is the row that this one continues, or None.
        tree: number of the prompt, from 0.
        group: rows with equal numbers are compared.
        kind: kind of its last turn, which `finish_reason` is about too.
        level: 0 for a row that continues a prompt.
        score: mean(turn) + Σ global.
        lost: reward that lies on no token; None if not stored.
        turns: its own; with an environment there may be several.
        tokens: from the row's first own token to its end.
        advantage: mean over its learning tokens; 0 if there are none.
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
    advantage: float


def describe_row_kind(rows: Sequence[BatchRow | RowAccount]) -> str:
    """Names comparable rows: by the kind of their turns, or "rollout"."""
    kinds = {row.kind for row in rows}
    alone = all(len(row.turns) == 1 for row in rows)
    return kinds.pop() if alone and len(kinds) == 1 else "rollout"


def build_row_accounts(
    batch: TokenBatch,
    trees: Sequence[RolloutTree],
    table: RewardTable,
    credit: CreditSpec,
    speech: ModelDialogue | None,
    *,
    tokens: Mapping[str, Tensor | None],
    turn_present: Tensor,
    groups: Tensor,
    lost: Tensor | None = None,
) -> tuple[RowAccount, ...]:
    """Builds the account of every row of a batch.

    Args:
        trees: trees that the rows refer to; `table` holds their rewards.
        speech: decodes tokens; None shows token ids instead.
        tokens: `[B, T]` by the names of `rlx.record.rollouts.TOKEN_COLUMNS`, the mask among them.
        turn_present: `[B, K]` bool turns with a reward.
        groups: `[B]` int64 rows with equal numbers are compared.
        lost: `[B]` reward on no token; None if not stored.
    """
    streams = {name: stream for name, stream in tokens.items() if stream is not None}
    placed = _place_named_rewards(batch, trees, table, turn_present, streams["mask"], credit)
    pieces = build_piece_splitter(speech)
    numbers = {(row.tree, row.segment): number for number, row in enumerate(batch.rows)}

    def build(number: int, row: BatchRow) -> RowAccount:
        tree = trees[row.tree]
        path = tree.path(row.segment)
        first = path.index(row.turns[0])
        values, parts = (
            {name: rows[number].tolist() for name, rows in kind.items()}
            for kind in (streams, placed)
        )
        lines = tuple(_list_token_lines(row, tree, path[first:], pieces, values, parts))
        before = [tree.segments[i] for i in path[:first]]
        turns = [tree.segments[i] for i in row.turns]
        return RowAccount(
            row=number,
            parent=numbers.get((row.tree, row.parent)),
            tree=row.tree,
            group=int(groups[number]),
            kind=row.kind,
            level=row.level,
            problem=tree.problem.id,
            score=table.total_score(row.tree, row.turns),
            lost=None if lost is None else float(lost[number]),
            finish_reason=tree.segments[row.segment].finish_reason,
            turns=tuple(
                TurnAccount(t.turn, t.kind, t.finish_reason, _mean_advantage(lines, t.turn))
                for t in turns
            ),
            context=tuple(
                ContextStretch(
                    s.author, s.kind, len(s.token_ids), s.text or "".join(pieces(s.token_ids))
                )
                for s in before
            ),
            rewards=tuple(
                RewardAccount(e.name, turn, e.raw, e.weight, e.status, e.reason, e.is_summed)
                for turn, e in _list_entries(row, tree, table)
            ),
            tokens=lines,
            advantage=_mean_advantage(lines),
        )

    return tuple(build(number, row) for number, row in enumerate(batch.rows))


def _mean_advantage(tokens: Sequence[TokenLine], turn: int | None = None) -> float:
    """Over the learning tokens of a turn, or of all turns."""
    learned = [t.advantage for t in tokens if t.learns and turn in (None, t.turn)]
    return sum(learned) / len(learned) if learned else 0.0


def _list_entries(
    row: BatchRow, tree: RolloutTree, table: RewardTable
) -> Iterator[tuple[int | None, RewardEntry]]:
    """The rewards of a row's turns with their numbers, and those of its rollout with None."""
    for place in row.turns:
        for entry in table.turns.get((row.tree, place), {}).values():
            yield tree.segments[place].turn, entry
    for entry in table.rollouts.get((row.tree, row.segment), {}).values():
        yield None, entry


def _list_token_lines(
    row: BatchRow,
    tree: RolloutTree,
    path: Sequence[int],
    pieces: Pieces,
    values: Mapping[str, list[float]],
    placed: Mapping[str, list[float]],
) -> Iterator[TokenLine]:
    at = tree.count_tokens(row.segment) - sum(len(tree.segments[i].token_ids) for i in path)
    for index in path:
        segment = tree.segments[index]
        turn = segment.turn if index in row.turns else None
        for token, text in zip(segment.token_ids, pieces(segment.token_ids), strict=True):
            own = {name: stream[at] for name, stream in values.items()}
            yield TokenLine(
                position=at,
                token=token,
                text=text,
                author=segment.author,
                turn=turn,
                learns=bool(own["mask"]),
                placed={name: rewards[at] for name, rewards in placed.items() if rewards[at]},
                kl=own.get("kl"),
                reward=own.get("token_rewards"),
                advantage=own["advantages"],
                weight=own["weights"],
                old_logprob=own["old_logprobs"],
                reference_logprob=own.get("reference_logprobs"),
                value=own.get("values"),
                target=own.get("returns"),
            )
            at += 1


def _place_named_rewards(
    batch: TokenBatch,
    trees: Sequence[RolloutTree],
    table: RewardTable,
    turn_present: Tensor,
    mask: Tensor,
    credit: CreditSpec,
) -> dict[str, Tensor]:
    """Places each weighted named reward on tokens: `[B, T]` by name.

    Placement is linear in the rewards, so the named parts add up to the whole.
    """
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    for b, row in enumerate(batch.rows):
        for turn, entry in _list_entries(row, trees[row.tree], table):
            if not entry.is_summed or entry.raw is None:
                continue
            zeros = (torch.zeros(turn_present.shape), torch.zeros(len(batch.rows)))
            of_turns, overall = parts.setdefault(entry.name, zeros)
            if turn is None:
                overall[b] = entry.weight * entry.raw
            else:
                of_turns[b, turn - 1] = entry.weight * entry.raw
    placement = build_placement(credit)
    return {
        name: place_rewards(
            CreditInputs.from_rewards(of_turns, turn_present, overall, batch.turn_ids, mask),
            placement=placement,
            turn_reduce=credit.turn_reduce,
            on_missing_turn=credit.on_missing_turn,
        ).token_rewards
        for name, (of_turns, overall) in parts.items()
    }
