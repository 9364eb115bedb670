"""Scores a step: computes named rewards in dependency order, by plugins in worker processes.

A model's fault is a score with a reason. A scorer's fault is an absent reward with a reason, and a
reward that needs an absent one is absent too. Absent is not zero.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from graphlib import TopologicalSorter
from operator import add
from statistics import fmean
from typing import Literal

from rlx.errors import RewardError
from rlx.plugin import FAILED, RewardPlugin, Sample, Score
from rlx.reward.plugin_process import RewardJob
from rlx.reward.pool import RewardPool
from rlx.rollout import NO_PARENT, RolloutTree, is_fault_segment
from rlx.spec import GlobalReward, TurnReward, ValueOnError

Place = tuple[int, int]
"""(tree, segment) of a turn; for a whole rollout, of its last turn."""


@dataclass(frozen=True, slots=True)
class RewardEntry:
    """One named reward of one turn or rollout.

    Attributes:
        raw: the plugin's value; None when absent.
        weight: factor in sums.
        status: "replaced" where `on_error` supplies a value in place of a fault.
        reason: the plugin's reason for a score, or the fault.
        parts: additional figures, never summed.
    """

    name: str
    raw: float | None
    weight: float
    status: Literal["scored", "absent", "replaced"]
    reason: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_summed(self) -> bool:
        """Whether it counts in sums: names that begin with `_` are recorded but never summed."""
        return self.raw is not None and not self.name.startswith("_")

    @property
    def is_fault(self) -> bool:
        """Whether the scorer failed, so that there is no verdict."""
        return self.status == "replaced" or (self.status == "absent" and self.reason is not None)


Entries = Mapping[str, RewardEntry]


@dataclass(frozen=True, slots=True)
class RewardTable:
    """All rewards of a step's trees.

    Attributes:
        turns: named rewards of every turn.
        dropped: turns excluded from training, because a scorer failed on them, on the rollout that
            they end, or on a turn that they continue.
        faults: number of entries lost to scorer faults, by reward name.
        rollouts: named rewards of every whole trajectory that continues a prompt.
        seconds: how long scoring by each reward took, added up over ranks.
    """

    turns: Mapping[Place, Entries]
    dropped: frozenset[Place]
    faults: Mapping[str, int]
    rollouts: Mapping[Place, Entries] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    def get_turn_total(self, place: Place) -> float | None:
        """Weighted sum of a turn's rewards; None if none of them counts."""
        return _sum_weighted_entries(self.turns.get(place, {}).values())

    def get_rollout_total(self, place: Place) -> float | None:
        return _sum_weighted_entries(self.rollouts.get(place, {}).values())

    def total_score(self, tree: int, turns: Sequence[int]) -> float | None:
        """mean(turn) + Σ global of a row with these policy segments; None if none of them counts.

        Reference:
            KG-R1, arXiv 2509.26383.
        """
        whole = self.get_rollout_total((tree, turns[-1]))
        known = [t for turn in turns if (t := self.get_turn_total((tree, turn))) is not None]
        if whole is None and not known:
            return None
        return (_add_in_order(known) / len(known) if known else 0.0) + (whole or 0.0)

    @classmethod
    def merge_tables(
        cls, tables: Sequence["RewardTable"], trees: Sequence[Sequence[int]]
    ) -> "RewardTable":
        """Merges tables of different trees: tree t of table i becomes `trees[i][t]`."""
        pairs = list(zip(tables, trees, strict=True))
        faults: Counter[str] = Counter()
        seconds: dict[str, float] = {}
        for table in tables:
            faults.update(table.faults)
            for name, own in table.seconds.items():
                seconds[name] = seconds.get(name, 0.0) + own
        return cls(
            turns={(to[t], s): e for table, to in pairs for (t, s), e in table.turns.items()},
            dropped=frozenset((to[t], s) for table, to in pairs for t, s in table.dropped),
            faults=dict(faults),
            seconds=seconds,
            rollouts={(to[t], s): e for table, to in pairs for (t, s), e in table.rollouts.items()},
        )


def sum_named_rewards(
    raw: Mapping[str, float | None], weights: Mapping[str, float] | None = None
) -> float | None:
    """Σ weight · raw of named rewards, weight 1 if it is not listed; None if none of them counts.
    Names that begin with `_` do not count, nor do values that are absent."""
    factors = weights or {}
    return _sum_weighted_entries(
        RewardEntry(name, value, factors.get(name, 1.0), "scored") for name, value in raw.items()
    )


def _sum_weighted_entries(entries: Iterable[RewardEntry]) -> float | None:
    counted = [e for e in entries if e.is_summed]
    if not counted:
        return None
    return _add_in_order(e.weight * e.raw for e in counted if e.raw is not None)


def _add_in_order(values: Iterable[float]) -> float:
    """Σ, one after the other: from Python 3.12 on, `sum` of floats may end in another bit."""
    return reduce(add, values, 0.0)


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward of the experiment, of every turn of the kind that `use` names, or of whole
    rollouts."""

    name: str
    use: TurnReward | GlobalReward
    plugin: RewardPlugin
    scope: Literal["turn", "global"] = "turn"

    def __post_init__(self) -> None:
        if isinstance(self.use, GlobalReward) != (self.scope == "global"):
            raise ValueError(f"{self.name}: a {type(self.use).__name__} of scope {self.scope!r}")

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(n for n in (self.use.of, self.use.requires) if n is not None)


def score_rollouts(
    trees: Sequence[RolloutTree],
    rewards: Sequence[NamedReward],
    pool: RewardPool,
) -> RewardTable:
    """Scores every turn and every whole rollout of every tree.

    Raises:
        RewardError: a scorer failed under `on_error: fail`, or an environment did.
    """
    by_name = {reward.name: reward for reward in rewards}
    order = TopologicalSorter({r.name: r.reads for r in rewards}).static_order()
    turns: dict[Place, dict[str, RewardEntry]] = {
        (t, s): {} for t, tree in enumerate(trees) for s in tree.policy_segments
    }
    rollouts: dict[Place, dict[str, RewardEntry]] = {
        (t, s): {} for t, tree in enumerate(trees) for s in tree.rollouts
    }
    table = RewardTable(turns, frozenset(), {}, rollouts)
    dropped = _find_failed_rollouts(trees)
    faults: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for name in order:
        reward, began = by_name[name], time.perf_counter()
        entries = turns if reward.scope == "turn" else rollouts
        for place, entry in _score_one(trees, reward, table, pool):
            if entry.is_fault:
                faults[name] = faults.get(name, 0) + 1
                entry = _apply_on_error(trees, reward, place, entry, dropped)
            entries[place][name] = entry
        seconds[name] = time.perf_counter() - began
    below = {  # dropping an answer drops its confidences
        (t, s)
        for t in {place[0] for place in dropped}
        for s in trees[t].policy_segments
        if any((t, earlier) in dropped for earlier in trees[t].turns(s))
    }
    return replace(table, dropped=frozenset(dropped | below), faults=faults, seconds=seconds)


def _find_failed_rollouts(trees: Sequence[RolloutTree]) -> set[Place]:
    """Rollouts whose environment failed, and the siblings of those that drop their group."""
    dropped: set[Place] = set()
    for t, tree in enumerate(trees):
        for segment in tree.segments:
            if not is_fault_segment(segment):
                continue
            if segment.info["on_error"] == "fail":
                by = segment.info.get("by", "environment")
                key = "rollout.on_error" if by == "agent" else "rollout.environment.on_error"
                raise RewardError(
                    f"the {by} failed on problem {tree.problem.id}: {segment.info['fault']}. "
                    f"To continue past such failures, set {key} to drop_sample or drop_group"
                )
            if segment.info["on_error"] == "drop_group":
                dropped |= {(t, s) for s in tree.policy_segments}
            else:
                dropped |= {(t, s) for s in tree.turns(segment.parent)}
    return dropped


def rescore_rollouts(
    trees: Sequence[RolloutTree],
    rewards: Sequence[NamedReward],
    table: RewardTable,
    pool: RewardPool,
) -> Iterator[tuple[NamedReward, Place, RewardEntry]]:
    """Scores trees again, with the values in `table` for the rewards that plugins read. Faults stay
    faults, regardless of `on_error`."""
    for reward in rewards:
        for place, entry in _score_one(trees, reward, table, pool):
            yield reward, place, entry


def _score_one(
    trees: Sequence[RolloutTree],
    reward: NamedReward,
    table: RewardTable,
    pool: RewardPool,
) -> Iterable[tuple[Place, RewardEntry]]:
    """One entry for each turn of the reward's kind, or for each rollout."""
    missing = RewardEntry(reward.name, None, reward.use.weight, "absent")
    samples: dict[Place, Sample] = {}
    use = reward.use
    for place in table.rollouts if reward.scope == "global" else table.turns:
        tree = trees[place[0]]
        kind = tree.segments[place[1]].kind
        if kind == FAILED or (isinstance(use, TurnReward) and not use.fits(kind)):
            continue  # the environment did not answer, or it is of another kind
        of = None if use.of is None else _read_value(tree, place, use.of, reward, table)
        gate = None
        if use.requires is not None:
            gate = _find_parent_value(tree, place, use.requires, reward, table)
        if (of is None and use.of is not None) or (gate is None and use.requires is not None):
            yield place, missing
            continue
        if gate is not None and gate <= 0:
            why = f"{use.requires} failed"
            yield place, replace(missing, raw=0.0, status="scored", reason=why)
            continue
        samples[place] = replace(_build_sample(tree, place), of=of)
    groups = _group_by_scope(trees, samples, reward)
    jobs = [
        RewardJob(reward.plugin, tuple(samples[p] for p in places), use.deadline, use.plugin)
        for places in groups
    ]
    for places, outcome in zip(groups, pool.score(jobs), strict=True):
        failed = outcome.fault is not None
        verdicts: Sequence[Score | None] = [None] * len(places) if failed else outcome.verdicts
        for place, verdict in zip(places, verdicts, strict=True):
            if verdict is None:
                yield place, replace(missing, reason=outcome.fault)
            else:
                raw, reason, parts = verdict.value, verdict.reason, verdict.parts
                yield place, replace(missing, raw=raw, status="scored", reason=reason, parts=parts)


def _read_value(
    tree: RolloutTree,
    place: Place,
    name: str,
    reward: NamedReward,
    table: RewardTable,
) -> float | None:
    """The raw value that `of` names, from the turns that `over` names; None if it is absent."""
    over = reward.use.over if isinstance(reward.use, TurnReward) else "path"
    if over == "path":
        return _find_parent_value(tree, place, name, reward, table)
    return compute_mean_value(tree, place, name, table.turns, below=over == "below")


def compute_mean_value(
    tree: RolloutTree,
    place: Place,
    name: str,
    turns: Mapping[Place, Entries],
    *,
    below: bool = False,
) -> float | None:
    """Mean raw value of a turn reward over the turns of a tree that have it, or over those `below`
    a place; None if none has."""
    values = [
        entry.raw
        for s in tree.policy_segments
        if not below or (s != place[1] and place[1] in tree.path(s))
        if (entry := turns[place[0], s].get(name)) is not None and entry.raw is not None
    ]
    return fmean(values) if values else None


def _find_parent_value(
    tree: RolloutTree,
    place: Place,
    name: str,
    reward: NamedReward,
    table: RewardTable,
) -> float | None:
    """Raw value of another reward of this rollout; or of this turn or the nearest earlier one."""
    if reward.scope == "global" and name in table.rollouts[place]:
        return table.rollouts[place][name].raw
    for segment in reversed(tree.turns(place[1])):
        if name in table.turns[place[0], segment]:
            return table.turns[place[0], segment][name].raw
    return None


def _build_sample(tree: RolloutTree, place: Place) -> Sample:
    segment = tree.segments[place[1]]
    before = [tree.segments[i] for i in tree.path(place[1])[:-1]]
    return Sample(
        id=f"{place[0]}.{place[1]}",
        problem=tree.problem.fields,
        turn=segment.kind,
        number=segment.turn,
        response=segment.text,
        spans={name: span.text for name, span in segment.spans.items()},
        n_tokens=len(segment.token_ids),
        context=tuple(s.text for s in before if s.author == "policy"),
        observations=tuple(s.text for s in before if s.author == "environment"),
        finish_reason=segment.finish_reason,
        info=segment.info,
        history=tuple(s.info for s in before if s.author == "policy"),
    )


def _group_by_scope(
    trees: Sequence[RolloutTree], samples: Mapping[Place, Sample], reward: NamedReward
) -> list[list[Place]]:
    """The places that are scored together: alone, with their siblings, or by tree. All whole
    rollouts of a tree are siblings."""
    scope = reward.plugin.scope
    if scope == "sample":
        return [[place] for place in samples]
    groups: dict[tuple[int, int], list[Place]] = {}
    for place in samples:
        earlier = trees[place[0]].turns(place[1])[:-1]
        beside = earlier and scope == "siblings" and reward.scope == "turn"
        groups.setdefault((place[0], earlier[-1] if beside else NO_PARENT), []).append(place)
    return list(groups.values())


def _apply_on_error(
    trees: Sequence[RolloutTree],
    reward: NamedReward,
    place: Place,
    entry: RewardEntry,
    dropped: set[Place],
) -> RewardEntry:
    """Applies `on_error` to the entries whose scorer failed."""
    policy, tree = reward.use.on_error, trees[place[0]]
    if isinstance(policy, ValueOnError):
        return replace(entry, raw=policy.value, status="replaced")
    if policy == "fail":
        use = reward.use
        what = f"turn {use.turn!r}" if isinstance(use, TurnReward) else "a whole rollout"
        raise RewardError(
            f"reward {reward.name!r} failed on {what} of problem {tree.problem.id}: "
            f"{entry.reason}. To continue past such failures, set "
            f"rewards.{reward.scope}.{reward.name}.on_error to drop_sample, drop_group or "
            "{value: 0}"
        )
    dropped.add(place)
    if policy == "drop_group":
        siblings: Sequence[int] = tree.rollouts
        if reward.scope == "turn":  # all turns of the sibling rows
            _, parent = tree.own_turns(place[1])
            siblings = [s for s in tree.policy_segments if tree.own_turns(s)[1] == parent]
        dropped.update((place[0], s) for s in siblings)
    return entry
