"""What can be counted over all rows of a trial: groups, kinds of turns, and what went missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from rlx.batch import list_batch_rows
from rlx.plan.row_report import RowAccount, TokenStretch, describe_row_kind
from rlx.plan.trial import PlanTrial

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
        group: its number; `tree` is the prompt's, `parent` the row that all of it continues.
        kind: what the rows are; "rollout" where they are of several turns.
        rows: numbers of its rows, `scores` theirs.
        std: sample deviation of the scores (ddof 1); None for a group of one.
        advantages: least and greatest of its tokens that learn.
        has_signal: some token of it has an advantage.
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
    """A kind of turn among all rows, or what an environment wrote between them.

    Attributes:
        kind: of turn, or "environment".
        rows: that have such turns, `turns` in all.
        tokens: that were written in them; `learning` of them are in the mask.
        share_of_tokens: of all that learn.
        share_of_gradient: of Σ weight · |advantage|, which is what the first update can claim.
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
    """What went missing on the way from responses to tokens.

    Attributes:
        rows: trained; `dropped` others were left out, since they could not be scored.
        turns_without_tokens: rewarded turns none of whose tokens learns.
        reward_lost: Σ |reward| that lies on no token; `reward_given` is what there was.
        rows_without_spans: rows in which none of the spans that their turn declares was found.
        rows_without_learning: rows none of whose tokens learns.
        unfinished: rollouts, of all that were made up, that the environment would have had go on.
    """

    rows: int
    dropped: int
    turns_without_tokens: int
    reward_lost: float
    reward_given: float
    rows_without_spans: int
    rows_without_learning: int
    unfinished: int


def list_group_statistics(rows: Sequence[RowAccount]) -> tuple[GroupStatistics, ...]:
    """The groups in order of their numbers."""
    members: dict[int, list[RowAccount]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    return tuple(_build_group_statistics(number, members[number]) for number in sorted(members))


def _build_group_statistics(number: int, rows: Sequence[RowAccount]) -> GroupStatistics:
    scores = tuple(row.score or 0.0 for row in rows)
    learned = [t.advantage for row in rows for t in row.tokens if t.learns] or [0.0]
    return GroupStatistics(
        group=number,
        tree=rows[0].tree,
        parent=rows[0].parent,
        kind=describe_row_kind(rows),
        rows=tuple(row.row for row in rows),
        scores=scores,
        mean=mean(scores),
        std=stdev(scores) if len(scores) > 1 else None,
        advantages=(min(learned), max(learned)),
        has_signal=any(learned),
    )


def list_kinds(rows: Sequence[RowAccount]) -> tuple[KindStatistics, ...]:
    """The kinds of turns, in order of appearance; what an environment wrote comes last."""
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
    """What went missing in a trial that was given credit."""
    train, rewards = trial.train, trial.rewards
    if train is None or rewards is None:
        raise ValueError("the trial was given no credit")
    declared = [level.turn.spans for level in trial.recipe.plan.levels]
    without = 0
    for row in train.batch.rows:
        segments = [trial.trees[row.tree].segments[turn] for turn in row.turns]
        without += bool(declared[row.level]) and not any(s.spans for s in segments)
    given = rewards.turn_rewards.abs().sum() + rewards.global_rewards.abs().sum()
    return MissingCounts(
        rows=len(train.batch.rows),
        dropped=len(list_batch_rows(trial.trees)) - len(train.batch.rows),
        turns_without_tokens=int(train.placed.missing.sum()),
        reward_lost=float(train.placed.lost.abs().sum()),
        reward_given=float(given),
        rows_without_spans=without,
        rows_without_learning=int((~train.mask.any(dim=1)).sum()),
        unfinished=len(trial.unfinished_turns),
    )
