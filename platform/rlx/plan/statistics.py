"""What can be counted over all rows of a trial: groups, kinds of turns, and what went missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from rlx.batch import rows_of
from rlx.plan.account import RowAccount
from rlx.plan.trial import Trial

__all__ = ["Counts", "Group", "Kind", "counts_of", "groups_of", "kinds_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that are compared with each other.

    Attributes:
        group: its number; `tree` is the prompt's, `parent` the row that all of it continues.
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
class Kind:
    """A kind of turn among all rows.

    Attributes:
        tokens: that the policy wrote in such turns; `learning` of them are in the mask.
        share_of_tokens: of all that learn.
        share_of_gradient: of Σ weight · |advantage|, which is what the first update can claim.
    """

    kind: str
    rows: int
    tokens: int
    learning: int
    share_of_tokens: float
    share_of_gradient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What went missing on the way from responses to tokens.

    Attributes:
        rows: trained; `dropped` others were left out, since they could not be scored.
        turns_without_tokens: rewarded turns none of whose tokens learns.
        reward_lost: Σ |reward| that lies on no token; `reward_given` is what there was.
        rows_without_spans: rows in which none of the spans that their turn declares was found.
        rows_without_learning: rows none of whose tokens learns.
    """

    rows: int
    dropped: int
    turns_without_tokens: int
    reward_lost: float
    reward_given: float
    rows_without_spans: int
    rows_without_learning: int


def groups_of(rows: Sequence[RowAccount]) -> tuple[Group, ...]:
    """The groups in order of their numbers."""
    members: dict[int, list[RowAccount]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    return tuple(_group(number, members[number]) for number in sorted(members))


def _group(number: int, rows: Sequence[RowAccount]) -> Group:
    scores = tuple(row.score or 0.0 for row in rows)
    learned = [t.advantage for row in rows for t in row.tokens if t.learns] or [0.0]
    return Group(
        group=number,
        tree=rows[0].tree,
        parent=rows[0].parent,
        kind=rows[0].kind,
        rows=tuple(row.row for row in rows),
        scores=scores,
        mean=mean(scores),
        std=stdev(scores) if len(scores) > 1 else None,
        advantages=(min(learned), max(learned)),
        has_signal=any(learned),
    )


def kinds_of(rows: Sequence[RowAccount]) -> tuple[Kind, ...]:
    """The kinds of rows, in order of appearance."""
    kinds = dict.fromkeys(row.kind for row in rows)
    learning = {k: sum(t.learns for r in rows if r.kind == k for t in r.tokens) for k in kinds}
    gradient = {k: sum(r.gradient_weight for r in rows if r.kind == k) for k in kinds}
    tokens, weight = sum(learning.values()), sum(gradient.values())
    return tuple(
        Kind(
            kind=kind,
            rows=sum(row.kind == kind for row in rows),
            tokens=sum(t.turn is not None for r in rows if r.kind == kind for t in r.tokens),
            learning=learning[kind],
            share_of_tokens=learning[kind] / tokens if tokens else 0.0,
            share_of_gradient=gradient[kind] / weight if weight else 0.0,
        )
        for kind in kinds
    )


def counts_of(trial: Trial) -> Counts:
    """What went missing in a trial that was given credit."""
    train, rewards = trial.train, trial.rewards
    if train is None or rewards is None:
        raise ValueError("the trial was given no credit")
    declared = {level.kind: level.turn.spans for level in trial.parts.plan.levels}
    without = 0
    for row in train.batch.rows:
        segments = [trial.trees[row.tree].segments[turn] for turn in row.turns]
        asked = any(declared.get(s.kind) for s in segments)
        without += asked and not any(s.spans for s in segments)
    given = rewards.turn_rewards.abs().sum() + rewards.global_rewards.abs().sum()
    return Counts(
        rows=len(train.batch.rows),
        dropped=len(rows_of(trial.trees)) - len(train.batch.rows),
        turns_without_tokens=int(train.placed.missing.sum()),
        reward_lost=float(train.placed.lost.abs().sum()),
        reward_given=float(given),
        rows_without_spans=without,
        rows_without_learning=int((~train.mask.any(dim=1)).sum()),
    )
