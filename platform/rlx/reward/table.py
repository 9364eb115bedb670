"""Named rewards of a step's turns and whole rollouts, each with its status.

A model's fault is a score with a reason. A scorer's fault is an absent reward with a reason, and a
reward that needs an absent one is absent too. Absent is not zero.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Literal

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
