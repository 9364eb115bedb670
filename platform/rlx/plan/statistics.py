"""Statistics over all rows of a trial: groups, kinds of turns, and losses on the way to tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev, stdev

from rlx.batch import list_batch_rows
from rlx.plan.row_report import RowAccount, TokenStretch
from rlx.trial import PlanTrial, describe_row_kind

__all__ = [
    "GroupStatistics",
    "KindStatistics",
    "MissingCounts",
    "count_trial_losses",
    "list_group_statistics",
    "list_kinds",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Rows that are compared with each other.

    Attributes:
        group: group number; `tree` is the prompt's number, `parent` the row that the group
            continues.
        kind: kind of the rows; "rollout" if they have several turns.
        rows: row numbers; `scores` are their scores.
        std: standard deviation of the scores, by the estimator's `ddof`; None for a group of one.
        advantages: minimum and maximum over its learning tokens.
        has_signal: at least one token has a non-zero advantage.
    """

    group: int
    tree: int
    parent: int | None
    kind: str
    rows: tuple[int, ...]
    scores: tuple[float, ...]
    mean: float
    std: float | None
    advantages: tuple[float, float]
    has_signal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KindStatistics:
    """A kind of turn over all rows, or the text that an environment wrote between turns.

    Attributes:
        kind: kind of turn, or "environment".
        rows: rows with such turns; `turns` is the number of turns.
        tokens: tokens in those turns; `learning` of them are in the loss mask.
        share_of_tokens: share of all learning tokens.
        share_of_gradient: share of Σ weight · |advantage|, which bounds the first update.
    """

    kind: str
    rows: int
    turns: int
    tokens: int
    learning: int
    share_of_tokens: float
    share_of_gradient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingCounts:
    """Losses on the way from responses to tokens.

    Attributes:
        rows: trained rows; `dropped` others were left out because they could not be scored.
        turns_without_tokens: rewarded turns without a learning token.
        reward_lost: Σ |reward| that lies on no token, out of `reward_given`.
        rows_without_spans: rows in which no declared span was found.
        rows_without_learning: rows without a learning token.
        unfinished: synthetic rollouts that ended before the environment was done.
    """

    rows: int
    dropped: int
    turns_without_tokens: int
    reward_lost: float
    reward_given: float
    rows_without_spans: int
    rows_without_learning: int
    unfinished: int


def list_group_statistics(
    rows: Sequence[RowAccount], get_ddof: Callable[[str], int]
) -> tuple[GroupStatistics, ...]:
    """Returns the groups in order of their numbers; `get_ddof` is `Estimator.get_ddof`."""
    members: dict[int, list[RowAccount]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    return tuple(
        _build_group_statistics(number, members[number], get_ddof) for number in sorted(members)
    )


def _build_group_statistics(
    number: int, rows: Sequence[RowAccount], get_ddof: Callable[[str], int]
) -> GroupStatistics:
    kind = describe_row_kind(rows)
    deviation = stdev if get_ddof(kind) else pstdev
    scores = tuple(row.score or 0.0 for row in rows)
    learned = [t.advantage for row in rows for t in row.tokens if t.learns] or [0.0]
    return GroupStatistics(
        group=number,
        tree=rows[0].tree,
        parent=rows[0].parent,
        kind=kind,
        rows=tuple(row.row for row in rows),
        scores=scores,
        mean=mean(scores),
        std=deviation(scores) if len(scores) > 1 else None,
        advantages=(min(learned), max(learned)),
        has_signal=any(learned),
    )


def list_kinds(rows: Sequence[RowAccount]) -> tuple[KindStatistics, ...]:
    """Returns the kinds of turns in order of appearance; "environment" comes last."""
    stretches: dict[str, list[tuple[int, TokenStretch]]] = {}
    for row in rows:
        for stretch in row.stretches:
            stretches.setdefault(stretch.kind, []).append((row.row, stretch))
    if "environment" in stretches:
        stretches["environment"] = stretches.pop("environment")
    lines = {k: [line for _, s in found for line in s.tokens] for k, found in stretches.items()}
    learning = {kind: sum(line.learns for line in own) for kind, own in lines.items()}
    gradient = {k: sum(abs(line.weight * line.advantage) for line in o) for k, o in lines.items()}
    tokens, weight = sum(learning.values()), sum(gradient.values())
    return tuple(
        KindStatistics(
            kind=kind,
            rows=len({row for row, _ in found}),
            turns=len(found),
            tokens=len(lines[kind]),
            learning=learning[kind],
            share_of_tokens=learning[kind] / tokens if tokens else 0.0,
            share_of_gradient=gradient[kind] / weight if weight else 0.0,
        )
        for kind, found in stretches.items()
    )


def count_trial_losses(trial: PlanTrial) -> MissingCounts:
    """Counts the losses of a trial whose credit was assigned."""
    train, rewards = trial.train, trial.rewards
    if train is None or rewards is None:
        raise ValueError("the trial has no credit")
    declared = [level.turn.spans for level in trial.recipe.plan.levels]
    without = 0
    for row in train.batch.rows:
        segments = [trial.trees[row.tree].segments[turn] for turn in row.turns]
        without += bool(declared[row.level]) and not any(s.spans for s in segments)
    total = rewards.turn_rewards.abs().sum() + rewards.global_rewards.abs().sum()
    return MissingCounts(
        rows=len(train.batch.rows),
        dropped=len(list_batch_rows(trial.trees)) - len(train.batch.rows),
        turns_without_tokens=int(train.placed.missing.sum()),
        reward_lost=float(train.placed.lost.abs().sum()),
        reward_given=float(total),
        rows_without_spans=without,
        rows_without_learning=int((~train.mask.any(dim=1)).sum()),
        unfinished=len(trial.unfinished_turns),
    )
