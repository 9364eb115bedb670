"""What must hold of every recorded step, each identity by name.

A step's credit is computed again from the stored scores, mask and streams, and never from what was
computed of them, so a figure that does not belong is found under its own name.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.credit.group import differ, extremes
from rlx.credit.place import mass
from rlx.plugin import Estimator
from rlx.probe.responses import responses
from rlx.record.probes import StoredPoint
from rlx.reward import NamedReward, Place, RewardEntry, RewardPool, RewardTable, rescore
from rlx.rollout import RolloutTree
from rlx.run.evidence import SHOWN, Evidence, Found, Value, Violation
from rlx.run.parts import Parts
from rlx.run.turn_identities import attention, observations, rewarded, turn_advantages, turns
from rlx.spec.estimator import DrGrpo, Gpg, Grpo, Opo, PassAtK, Rloo, TwoLevel, Uniform

__all__ = ["IDENTITIES", "Identity", "probe_scores"]

RTOL = 1e-6
"""For sums, which threads may add up in another order; all else is compared bit for bit."""

_CENTRED = (Grpo, Uniform, DrGrpo, Rloo, Gpg, TwoLevel)
"""Estimators whose advantages have mean 0 within a group."""
_COMPARING = (*_CENTRED, Opo, PassAtK)
"""Estimators that see nothing of a row's score but how it differs from its group's."""


class Identity(NamedTuple):
    """Something that must hold, and what it is counted in."""

    name: str
    says: str
    unit: str
    check: Callable[[Evidence], Found]


# Scores -----------------------------------------------------------------------------------------


def _scores(e: Evidence) -> Found:
    row_of = {
        (row.tree, turn): number for number, row in enumerate(e.batch.rows) for turn in row.turns
    }
    checked, wrong = 0, []
    for place, differing in _rescored(e.stored.trees, e.stored.rewards, e.parts.rewards, e.pool):
        checked += 1
        for what, before, after in differing:
            place_of = {"tree": place[0], "row": row_of.get(place)}
            turn = e.stored.trees[place[0]].segments[place[1]].turn
            told = Violation(
                step=e.step, turn=turn, what=what, stored=before, expected=after, **place_of
            )
            wrong.append(told)
    return Found(checked, len(wrong), tuple(wrong[:SHOWN]))


def probe_scores(step: int, points: Sequence[StoredPoint], parts: Parts, pool: RewardPool) -> Found:
    """Whether the stored scores of a probe are those of the stored texts, scored as in training.

    Args:
        step: of the run.
        points: of its table.
        parts: of the experiment itself, which probes use in every phase.
        pool: where plugins score.
    """
    level = parts.plan.levels[0]
    trees = [responses(p.problem, (), level, p.responses) for p in points]
    places = [
        ((t, s), point, s - 1) for t, point in enumerate(points) for s in trees[t].policy_segments
    ]
    stored = RewardTable(
        turns={place: point.rewards[i] for place, point, i in places},
        dropped=frozenset(),
        faults={},
        rollouts={place: point.global_rewards[i] for place, point, i in places},
    )
    checked, wrong = 0, []
    for (t, s), differing in _rescored(trees, stored, parts.rewards, pool):
        checked += 1
        for what, before, after in differing:
            point = points[t]
            where = f"{point.scheme}, point {point.point}, sample {s - 1}, of {point.problem.id}"
            said = f"{what} ({where})"
            wrong.append(Violation(step=step, what=said, stored=before, expected=after))
    return Found(checked, len(wrong), tuple(wrong[:SHOWN]))


def _rescored(
    trees: Sequence[RolloutTree],
    stored: RewardTable,
    rewards: Sequence[NamedReward],
    pool: RewardPool,
) -> Iterator[tuple[Place, Iterator[tuple[str, Value, Value]]]]:
    """Every stored score's place, and what the plugin does not say again.

    Rewards that others read are taken as stored; where a scorer failed there is no score.
    """
    for reward, place, now in rescore(trees, rewards, stored, pool):
        held = stored.turns if reward.scope == "turn" else stored.rollouts
        then = held.get(place, {}).get(reward.name)
        if then is None or not then.is_fault:
            yield place, _differing(reward.name, then, now)


def _differing(
    name: str, then: RewardEntry | None, now: RewardEntry
) -> Iterator[tuple[str, Value, Value]]:
    """What a stored score says and the plugin does not."""
    if then is None:
        yield f"reward {name}", "nothing", _said(now)
    elif (then.raw, then.status) != (now.raw, now.status):
        yield f"reward {name}", _said(then), _said(now)
    elif (then.reason, dict(then.parts)) != (now.reason, dict(now.parts)):
        yield f"reason and parts of {name}", _details(then), _details(now)
    elif then.weight != now.weight:
        yield f"weight of {name}", then.weight, now.weight


def _said(entry: RewardEntry) -> Value:
    if entry.raw is not None:
        return entry.raw
    return f"absent: {entry.reason}" if entry.reason else "absent"


def _details(entry: RewardEntry) -> str:
    return f"{entry.reason or 'no reason'}; {dict(entry.parts)}"


def _totals(e: Evidence) -> Found:
    first: list[Violation] = []
    checked, violated = 0, 0
    for name, expected in vars(e.again.scores).items():
        stored = e.rows.scores.get(name)
        if stored is None:
            continue
        found = e.compared(name, stored, expected, ~_near(stored, expected), len(stored))
        checked, violated = max(checked, found.checked), violated + found.violated
        first += found.first
    return Found(checked, violated, tuple(first[:SHOWN]))


# Masks and placement ----------------------------------------------------------------------------


def _masks(e: Evidence) -> Found:
    expected = e.parts.mask(e.batch)
    return e.compared("mask", e.mask, expected, e.mask != expected, int(e.rows.own.sum()))


def _mass(e: Evidence) -> Found:
    credit, rewards = e.parts.spec.credit, e.rewards
    whole = credit.resolved_placement == "final_token_only"
    reduce = credit.turn_reduce or ("mean" if whole else "sum")
    turns = torch.where(rewards.turn_present, rewards.turn_rewards, 0.0).double()
    count = rewards.turn_present.sum(dim=1).clamp(min=1) if reduce == "mean" else 1
    given = turns.sum(dim=1) / count + rewards.global_rewards.double()
    found = mass(e.tokens("placed").double(), e.rows.own) + e.again.placed.lost.double()
    # Parts of opposite sign may cancel, so the scale is that of the parts.
    scale = turns.abs().sum(dim=1) + rewards.global_rewards.double().abs()
    wrong = ~((found - given).abs() <= RTOL * scale)
    return e.compared("placed and lost reward", found, given, wrong, len(given))


def _placement(e: Evidence) -> Found:
    return _learning(e, "placed", e.again.placed.token_rewards)


# KL, advantages and weights ---------------------------------------------------------------------


def _kl(e: Evidence) -> Found:
    return _learning(e, "kl", e.again.kl, exact=_without_exponentials(e))


def _token_rewards(e: Evidence) -> Found:
    return _learning(e, "token_rewards", e.again.token_rewards, exact=_without_exponentials(e))


def _without_exponentials(e: Evidence) -> bool:
    """Processors differ in the last bit of an exponential."""
    return e.parts.spec.credit.kl_penalty not in ("k3", "low_var_kl")


def _advantages(e: Evidence) -> Found:
    return _learning(e, "advantages", e.again.advantages, exact=False)


def _returns(e: Evidence) -> Found:
    return _learning(e, "returns", e.again.returns, exact=False)


def _weights(e: Evidence) -> Found:
    return _learning(e, "weights", e.again.weights)


def _learning(e: Evidence, name: str, expected: Tensor | None, *, exact: bool = True) -> Found:
    """A stored `[B, T]` stream against the same computed again."""
    stored = e.rows.tokens[name]
    if stored is None or expected is None:
        if stored is None and expected is None:
            return Found(0)
        held, wanted = ("none", "one") if stored is None else ("one", "none")
        return Found(0, 1, (Violation(step=e.step, what=name, stored=held, expected=wanted),))
    same = (stored == expected) | (stored.isnan() & expected.isnan())
    wrong = ~(same if exact else same | _near(stored, expected))
    return e.compared(name, stored, expected, wrong, int(e.mask.sum()))


def _outside(e: Evidence) -> Found:
    outside = e.rows.own & ~e.mask
    first: list[Violation] = []
    violated = 0
    for name in ("advantages", "weights", "token_rewards"):
        stored = e.tokens(name)
        found = e.compared(name, stored, torch.zeros_like(stored), outside & (stored != 0), 0)
        violated += found.violated
        first += found.first
    return Found(int(outside.sum()), violated, tuple(first[:SHOWN]))


# Groups -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Groups:
    """Rows that were compared: `slot` `[B]` is a row's group, all else `[G]` is of the groups."""

    slot: Tensor
    sizes: Tensor
    highest: Tensor
    lowest: Tensor

    @staticmethod
    def of(e: Evidence) -> "_Groups":
        scores = e.again.scores.total_score
        if e.parts.spec.credit.score_source == "token_rewards" and e.estimator.reads == "scores":
            scores = mass(e.again.token_rewards, e.mask)
        _, slot, sizes = e.batch.group_ids.unique(return_inverse=True, return_counts=True)
        return _Groups(slot, sizes, *extremes(scores, slot, len(sizes)))


def _reads_one_score(estimator: Estimator) -> bool:
    """Whether it compares rows by what `_Groups` takes for their scores."""
    return estimator.reading() == "scores" or isinstance(estimator, Uniform)


def _equal_scores(e: Evidence) -> Found:
    """A group of one may get its raw score, so it is not looked at; nor is what is normalised once
    more within the prompt, where a mean of 0 is one but for rounding."""
    again = isinstance(e.estimator, TwoLevel) and e.estimator.second_level == "prompt_renorm"
    if again or not (isinstance(e.estimator, _COMPARING) and _reads_one_score(e.estimator)):
        return Found(0)
    groups = _Groups.of(e)
    alike = (~differ(groups.highest, groups.lowest) & (groups.sizes > 1))[groups.slot]
    stored = e.tokens("advantages")
    wrong = alike[:, None] & e.mask & (stored != 0)
    return e.compared("advantages", stored, torch.zeros_like(stored), wrong, int(alike.sum()))


def _centred(e: Evidence) -> Found:
    """Rounding is that of the scores, and the larger the closer together they lie."""
    if not (isinstance(e.estimator, _CENTRED) and _reads_one_score(e.estimator)):
        return Found(0)
    groups, learns = _Groups.of(e), e.mask.any(dim=1)
    per_row = mass(e.tokens("advantages"), e.mask) / e.mask.sum(dim=1).clamp(min=1)
    zeros = per_row.new_zeros(len(groups.sizes))
    means = zeros.index_add(0, groups.slot, per_row) / groups.sizes
    largest = zeros.scatter_reduce(0, groups.slot, per_row.abs(), "amax")
    silent = zeros.index_add(0, groups.slot, (~learns).to(per_row.dtype)) > 0
    peak = torch.maximum(groups.highest.abs(), groups.lowest.abs())
    spread = groups.highest - groups.lowest
    allowed = largest * (1e-5 + 1e-6 * peak / spread)
    looked_at = (groups.sizes > 1) & (spread > 0) & ~silent
    wrong = (looked_at & ~(means.abs() <= allowed)).nonzero()[:, 0].tolist()
    first = [
        e.violation("mean advantage of the group", float(means[g]), 0.0, _first(groups.slot == g))
        for g in wrong[:SHOWN]
    ]
    return Found(int(looked_at.sum()), len(wrong), tuple(first))


def _first(rows: Tensor) -> int:
    return int(rows.nonzero()[0, 0])


def _near(stored: Tensor, expected: Tensor) -> Tensor:
    """Equal but for the order in which float32 was added up."""
    scale = torch.where(expected.isfinite(), expected, 0.0).abs()
    slack = RTOL * scale.max() if scale.numel() else 0.0
    return (stored == expected) | ((stored - expected).abs() <= slack)


IDENTITIES: tuple[Identity, ...] = (
    Identity("scores", "stored scores are the plugins' of the stored text", "scores", _scores),
    Identity("rewarded", "rewards are of turns and rollouts that there are", "rewards", rewarded),
    Identity("turns", "every turn has an id of its own, the last one too", "turns", turns),
    Identity("masks", "the mask is the strategy's", "tokens", _masks),
    Identity("attention", "without state_masking all of the response learns", "tokens", attention),
    Identity("mass", "placed and lost reward is all that was given", "rows", _mass),
    Identity("placement", "rewards lie where the placement puts them", "tokens", _placement),
    Identity("kl", "KL is the estimator's of the log-probabilities", "tokens", _kl),
    Identity("token_rewards", "what was placed, less β·KL", "tokens", _token_rewards),
    Identity("advantages", "advantages are the estimator's", "tokens", _advantages),
    Identity("turn_advantages", "a turn has one advantage, its own", "turns", turn_advantages),
    Identity("returns", "returns are the estimator's", "tokens", _returns),
    Identity("weights", "weights are the loss's aggregation", "tokens", _weights),
    Identity("equal_scores", "equal scores in a group get exactly 0", "rows", _equal_scores),
    Identity("group_means", "advantages of a group have mean 0", "groups", _centred),
    Identity("outside", "nothing lies outside the mask", "tokens", _outside),
    Identity(
        "observations", "observations have no weight, KL or advantage", "tokens", observations
    ),
    Identity("totals", "the scores of rows are sums of their rewards", "rows", _totals),
)
"""In the order in which one rests on another."""
