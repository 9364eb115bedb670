"""The account of a row: the reward, advantage and weight of each token, and from which rewards.

Synthetic rollouts and rollouts that a run has stored use the same types.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor

from rlx.batch import BatchRow, TokenBatch, build_token_batch
from rlx.credit import CreditInputs, place_rewards
from rlx.discovery import build_placement
from rlx.errors import RegistryError
from rlx.model import ModelDialogue, folder_dialogue, load_local_dialogue
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import Author, Pieces, RolloutTree, build_piece_splitter
from rlx.spec import CreditSpec, ExperimentSpec, ModelSpec
from rlx.step import join_row_rewards

if TYPE_CHECKING:
    from rlx.record import TrainedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """One token of a row; log-probabilities and KL are in nats.

    Attributes:
        position: index in the row, from 0; `token` is the token's id.
        text: the token's share of the row's text; for a special token, its name.
        turn: turn number, from 1; None between turns.
        learns: whether the loss mask includes it.
        placed: non-zero rewards on the token by name; they add up to its placed reward.
        kl: against the reference policy; None, as `reference_logprob`, without one.
        reward: token reward that the estimator read, KL included; None if not stored.
        advantage: 0 outside the mask.
        weight: weight in the step's loss.
        value, target: the critic's estimate and target; None without one.
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
    """A turn of a row, by its number in the rollout, from 1, with the mean advantage of its
    learning tokens; 0 if there are none."""

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


def _mean_advantage(tokens: Sequence[TokenLine]) -> float:
    learned = [t.advantage for t in tokens if t.learns]
    return sum(learned) / len(learned) if learned else 0.0


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
    accounts = []
    for number, row in enumerate(batch.rows):
        tree = trees[row.tree]
        path = tree.path(row.segment)
        first = path.index(row.turns[0])
        lines = tuple(
            _list_token_lines(
                row,
                tree,
                path[first:],
                pieces,
                values={name: stream[number].tolist() for name, stream in streams.items()},
                placed={name: rewards[number].tolist() for name, rewards in placed.items()},
            )
        )
        named: list[tuple[int | None, Mapping[str, RewardEntry]]] = [
            (tree.segments[s].turn, table.turns.get((row.tree, s), {})) for s in row.turns
        ]
        named.append((None, table.rollouts.get((row.tree, row.segment), {})))
        account = RowAccount(
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
                TurnAccount(
                    number=turn.turn,
                    kind=turn.kind,
                    finish_reason=turn.finish_reason,
                    advantage=_mean_advantage([line for line in lines if line.turn == turn.turn]),
                )
                for turn in (tree.segments[i] for i in row.turns)
            ),
            context=tuple(
                ContextStretch(
                    s.author, s.kind, len(s.token_ids), s.text or "".join(pieces(s.token_ids))
                )
                for s in (tree.segments[i] for i in path[:first])
            ),
            rewards=tuple(
                RewardAccount(e.name, turn, e.raw, e.weight, e.status, e.reason, e.is_summed)
                for turn, entries in named
                for e in entries.values()
            ),
            tokens=lines,
            advantage=_mean_advantage(lines),
        )
        accounts.append(account)
    return tuple(accounts)


def _list_token_lines(
    row: BatchRow,
    tree: RolloutTree,
    path: Sequence[int],
    pieces: Pieces,
    *,
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
        places: list[tuple[int, tuple[int, ...], Mapping[str, RewardEntry]]] = [
            (0, (b, trees[row.tree].segments[s].turn - 1), table.turns.get((row.tree, s), {}))
            for s in row.turns
        ]
        places.append((1, (b,), table.rollouts.get((row.tree, row.segment), {})))
        for scope, at, entries in places:
            for entry in entries.values():
                if entry.is_summed and entry.raw is not None:
                    zeros = (torch.zeros(turn_present.shape), torch.zeros(len(batch.rows)))
                    parts.setdefault(entry.name, zeros)[scope][at] = entry.weight * entry.raw
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


def load_phase_spec(resolved: Mapping[str, Any], phase: str) -> ExperimentSpec:
    """Returns a run's experiment, from its resolved spec, with the settings of one phase.

    Raises:
        RegistryError: another version of rlx wrote it.
    """
    try:
        spec = ExperimentSpec.from_record(resolved)
        return spec.resolve_phase_spec(next(p for p in spec.phases if p.name == phase))
    except (ValidationError, StopIteration) as error:
        raise RegistryError(
            "this version of rlx cannot read the experiment of this run; use the version that "
            "recorded it"
        ) from error


def load_run_speech(spec: ModelSpec, tokenizer: Path, exported: Path) -> ModelDialogue | None:
    """The dialogue of a run's model, from its initial files (`RunFolder.tokenizer`) or its export
    (`RunFolder.model`); None without them.
    """
    dialogue = load_local_dialogue(spec, tokenizer)
    if dialogue is None and (exported / "config.json").is_file():
        return folder_dialogue(exported, chat_template=getattr(spec, "chat_template", False))
    return dialogue


def stored_accounts(
    trees: Sequence[RolloutTree],
    table: RewardTable,
    rows: "TrainedRows",
    credit: CreditSpec,
    speech: ModelDialogue | None,
) -> tuple[RowAccount, ...]:
    """Returns the account of every row that a step trained on.

    Args:
        trees: all trees of the step; `table` holds their rewards.
        rows: the trained rows, in the order of `rlx.batch.list_batch_rows`.
        speech: decodes tokens; None shows token ids instead.

    Raises:
        RegistryError: the step was stored without its mask.
    """
    mask = rows.tokens.get("mask")
    if mask is None:
        raise RegistryError("these rollouts were recorded without their mask")
    trained = {(tree, segment) for tree, segment, *_ in rows.places}
    batch = build_token_batch(trees, without=set(table.turns) - trained)
    present = join_row_rewards(batch, trees, table, mask).rewards.turn_present
    return build_row_accounts(
        batch,
        trees,
        table,
        credit,
        speech,
        tokens=rows.tokens,
        turn_present=present,
        groups=rows.groups,
    )
