"""Named rewards of a step: scored in order of their dependencies, each with what became of it.

A model's fault is a score with its reason. A scorer's fault is an absence with its reason, and a
reward that needs an absent one is absent. Absent is not zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from typing import Literal

from rlx.errors import RewardError
from rlx.plugin import RewardPlugin, Sample, Score
from rlx.reward.workers import Job, Outcome, RewardPool
from rlx.rollout import NO_PARENT, RolloutTree
from rlx.spec import TurnReward, ValueOnError

__all__ = ["NamedReward", "RewardEntry", "RewardTable", "score"]

Place = tuple[int, int]
"""(tree, segment) of a turn."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A turn reward of the experiment, with its plugin made."""

    name: str
    use: TurnReward
    plugin: RewardPlugin


@dataclass(frozen=True, slots=True)
class RewardEntry:
    """One named reward of one turn.

    Attributes:
        raw: what the plugin said; None when absent.
        weight: what it is multiplied by in sums.
        status: "scored", or "absent" with `reason` saying why.
        reason: the plugin's own words for a score, or the fault.
        parts: figures beside the score.
    """

    name: str
    raw: float | None
    weight: float
    status: Literal["scored", "absent"]
    reason: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Enters sums: names that begin with `_` are kept and never summed."""
        return self.raw is not None and not self.name.startswith("_")


@dataclass(frozen=True, slots=True)
class RewardTable:
    """All rewards of a step's trees.

    Attributes:
        turns: for every scored turn its named rewards.
        dropped: turns that take no part in training, because a scorer failed on them or on what
            they continue.
        faults: how many entries are absent through a scorer's fault, by reward name.
    """

    turns: Mapping[Place, Mapping[str, RewardEntry]]
    dropped: frozenset[Place]
    faults: Mapping[str, int]

    def total(self, place: Place) -> float | None:
        """Weighted sum of a turn's rewards; None when none of them counts."""
        counted = [e for e in self.turns.get(place, {}).values() if e.counts]
        return sum(e.weight * e.raw for e in counted if e.raw is not None) if counted else None


def score(
    trees: Sequence[RolloutTree], rewards: Sequence[NamedReward], pool: RewardPool
) -> RewardTable:
    """Scores every turn of every tree.

    Args:
        trees: of one step.
        rewards: in any order; `of` may name another of them.
        pool: where plugins run.

    Raises:
        RewardError: a scorer failed under `on_error: fail`.
    """
    by_name = {reward.name: reward for reward in rewards}
    order = TopologicalSorter({r.name: _reads(r.use) for r in rewards}).static_order()
    turns: dict[Place, dict[str, RewardEntry]] = {
        (t, s): {} for t, tree in enumerate(trees) for s in tree.policy_segments
    }
    dropped: set[Place] = set()
    faults: dict[str, int] = {}
    for name in order:
        reward = by_name[name]
        for place, entry in _score_one(trees, reward, by_name, turns, pool):
            if entry.status == "absent" and entry.reason is not None:
                faults[name] = faults.get(name, 0) + 1
                entry = _settle(trees, reward, place, entry, dropped)
            turns[place][name] = entry
    return RewardTable(turns, frozenset(_with_descendants(trees, dropped)), faults)


def _reads(use: TurnReward) -> list[str]:
    """The rewards that must be known before this one."""
    return [name for name in (use.of, use.requires) if name is not None]


def _score_one(
    trees: Sequence[RolloutTree],
    reward: NamedReward,
    by_name: Mapping[str, NamedReward],
    turns: Mapping[Place, Mapping[str, RewardEntry]],
    pool: RewardPool,
) -> Iterable[tuple[Place, RewardEntry]]:
    """One entry for each turn of the reward's kind."""
    weight = reward.use.weight
    missing = RewardEntry(reward.name, None, weight, "absent")
    samples: dict[Place, Sample] = {}
    for place in turns:
        tree = trees[place[0]]
        if tree.segments[place[1]].kind != reward.use.turn:
            continue
        read = {
            name: _parent_entry(tree, place, by_name[name], turns) for name in _reads(reward.use)
        }
        known = {name: e.raw for name, e in read.items() if e is not None and e.raw is not None}
        if len(known) < len(read):
            yield place, missing
            continue
        gate = reward.use.requires
        if gate is not None and known[gate] <= 0:
            yield place, replace(missing, raw=0.0, status="scored", reason=f"{gate} failed")
            continue
        of = known[reward.use.of] if reward.use.of is not None else None
        samples[place] = replace(_sample(tree, place), of=of)
    groups = _scoped(trees, samples, reward.plugin.scope)
    jobs = [
        Job(reward.plugin, tuple(samples[p] for p in places), reward.use.deadline)
        for places in groups
    ]
    for places, outcome in zip(groups, pool.score(jobs), strict=True):
        for place, verdict in zip(places, _verdicts(outcome, len(places)), strict=True):
            if isinstance(verdict, str):
                yield place, replace(missing, reason=verdict)
            elif verdict is None:
                yield place, missing
            else:
                yield (
                    place,
                    RewardEntry(
                        reward.name, verdict.value, weight, "scored", verdict.reason, verdict.parts
                    ),
                )


def _verdicts(outcome: Outcome, count: int) -> Sequence[Score | str | None]:
    return [outcome.fault] * count if outcome.fault is not None else outcome.verdicts


def _sample(tree: RolloutTree, place: Place) -> Sample:
    segment = tree.segments[place[1]]
    earlier = tree.turns(place[1])[:-1]
    return Sample(
        id=f"{place[0]}.{place[1]}",
        problem=tree.problem.fields,
        turn=segment.kind,
        number=segment.turn,
        response=segment.text,
        spans={name: span.text for name, span in segment.spans.items()},
        context=tuple(tree.segments[i].text for i in earlier),
        finish_reason=segment.finish_reason,
        info=segment.info,
    )


def _parent_entry(
    tree: RolloutTree,
    place: Place,
    parent: NamedReward,
    turns: Mapping[Place, Mapping[str, RewardEntry]],
) -> RewardEntry | None:
    """The parent reward of this turn, or of the nearest earlier turn of the parent's kind."""
    for segment in reversed(tree.turns(place[1])):
        if tree.segments[segment].kind == parent.use.turn:
            return turns[place[0], segment].get(parent.name)
    return None


def _scoped(
    trees: Sequence[RolloutTree], samples: Mapping[Place, Sample], scope: str
) -> list[list[Place]]:
    """Turns that are scored together: alone, with what continues the same turn, or by tree."""
    if scope == "sample":
        return [[place] for place in samples]
    groups: dict[tuple[int, int], list[Place]] = {}
    for place in samples:
        earlier = trees[place[0]].turns(place[1])[:-1]
        parent = earlier[-1] if earlier and scope == "siblings" else NO_PARENT
        groups.setdefault((place[0], parent), []).append(place)
    return list(groups.values())


def _settle(
    trees: Sequence[RolloutTree],
    reward: NamedReward,
    place: Place,
    entry: RewardEntry,
    dropped: set[Place],
) -> RewardEntry:
    """Applies `on_error` to a turn whose scorer failed."""
    policy = reward.use.on_error
    if isinstance(policy, ValueOnError):
        return replace(entry, raw=policy.value, status="scored")
    if policy == "fail":
        raise RewardError(
            f"reward {reward.name!r} failed on turn {reward.use.turn!r} of problem "
            f"{trees[place[0]].problem.id}: {entry.reason}. To carry on past such failures set "
            f"rewards.turn.{reward.name}.on_error to drop_sample, drop_group or {{value: 0}}"
        )
    dropped.add(place)
    if policy == "drop_group":
        tree = trees[place[0]]
        segment = tree.segments[place[1]]
        before = tree.turns(place[1])[:-1]
        dropped.update(
            (place[0], s)
            for s in tree.policy_segments
            if tree.segments[s].kind == segment.kind and tree.turns(s)[:-1] == before
        )
    return entry


def _with_descendants(trees: Sequence[RolloutTree], dropped: set[Place]) -> set[Place]:
    """Dropping an answer drops its confidences."""
    return dropped | {
        (t, s)
        for t in {place[0] for place in dropped}
        for s in trees[t].policy_segments
        if any((t, earlier) in dropped for earlier in trees[t].turns(s))
    }
