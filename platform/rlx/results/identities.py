"""Identities that must hold for every recorded step, by name.

Each figure is recomputed from the stored scores, mask and streams, never from other stored results,
so a wrong figure is reported under its own name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.credit import (
    CreditInputs,
    assign_comparison_groups,
    compute_group_extremes,
    has_score_spread,
    sum_token_rewards,
)
from rlx.phase_setup import PhaseSetup
from rlx.plugin import Estimator, Mask
from rlx.probe import build_response_tree
from rlx.record import StoredPoint, StoredStep, TrainedRows
from rlx.results.rescoring import credit_stored_rows, flatten_stored_rows
from rlx.reward import NamedReward, Place, RewardEntry, RewardPool, RewardTable, rescore_rollouts
from rlx.rollout import NO_PARENT, RolloutTree
from rlx.spec import (
    DrGrpo,
    Gpg,
    Grpo,
    MultiTurnRolloutSpec,
    Opo,
    PassAtK,
    Rloo,
    TwoLevel,
    Uniform,
)
from rlx.train_batch import ScoredRows, TrainBatch

VIOLATIONS_KEPT = 3
"""Violations reported per identity and step; further ones are only counted."""
Value = float | str | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A stored value that differs from the expected one.

    Attributes:
        step: step of the run, from 1.
        tree: tree of the step.
        row: row of the step's batch; None if the item was not trained on.
        turn: turn number, from 1; None if the figure belongs to no turn.
        token: position in the row, 0 for the prompt's first token; None if it belongs to no token.
        what: name of the figure, such as "advantages" or "reward accuracy".
        stored, expected: the stored and the expected value.
    """

    step: int
    tree: int | None = None
    row: int | None = None
    turn: int | None = None
    token: int | None = None
    what: str
    stored: Value
    expected: Value


class IdentityResult(NamedTuple):
    """Result of one identity in one step: items checked, number of violations, the first ones."""

    checked: int
    violated: int = 0
    first: tuple[Violation, ...] = ()

    @staticmethod
    def from_violations(checked: int, wrong: Sequence[Violation]) -> "IdentityResult":
        """The result of a check that lists every violation."""
        return IdentityResult(checked, len(wrong), tuple(wrong[:VIOLATIONS_KEPT]))

    @staticmethod
    def join(checked: int, results: Sequence["IdentityResult"]) -> "IdentityResult":
        """The result of checks of several figures of the same items."""
        first = [violation for result in results for violation in result.first]
        violated = sum(result.violated for result in results)
        return IdentityResult(checked, violated, tuple(first[:VIOLATIONS_KEPT]))


@dataclass(frozen=True, eq=False)
class StepEvidence:
    """One stored step with everything needed to recompute its figures.

    Attributes:
        step: step number.
        stored: the step as read from disk; it has trained rows.
        setup: setup of the phase, from the run's spec.
        strategy: options of `setup.mask`.
        estimator: options of `setup.estimator`.
        statistics: what the step recorded beside its rollouts: `beta`, the β of KL in the reward;
            `state_before`, the estimator state carried over from the previous step; `max_tokens`,
            the token budget of each kind of turn.
        pool: workers that score rewards.
    """

    step: int
    stored: StoredStep
    setup: PhaseSetup
    strategy: Mask
    estimator: Estimator
    statistics: Mapping[str, Any]
    pool: RewardPool

    @property
    def rows(self) -> TrainedRows:
        """The trained rows."""
        return self.stored.rows

    @cached_property
    def scored_rows(self) -> ScoredRows:
        """The trained rows, flattened again from the stored trees, with their stored rewards."""
        rows = flatten_stored_rows(self.stored, self.setup, self.stored.rewards, mask=self.mask)
        if rows is None:
            raise ValueError(f"step {self.step} has no trained rows")
        return rows

    @property
    def batch(self) -> TokenBatch:
        """The trained rows as tokens."""
        return self.scored_rows.batch

    @property
    def rewards(self) -> CreditInputs:
        """Row rewards, summed from the stored scores."""
        return self.scored_rows.rewards

    @cached_property
    def recomputed_batch(self) -> TrainBatch:
        """The step's credit assignment, recomputed."""
        train, _ = credit_stored_rows(
            self.step,
            self.stored,
            self.scored_rows,
            self.setup,
            beta=self.statistics["beta"],
            state=self.statistics["state_before"],
            max_tokens=self.statistics["max_tokens"],
        )
        return train

    @cached_property
    def mask(self) -> Tensor:
        """`[B, T]` bool, as stored."""
        return self.get_token_stream("mask")

    @property
    def credited(self) -> Tensor:
        """`[B, T]` bool tokens in the mask that have the estimator's credit: all but those of
        confidences whose expected score is in the loss."""
        expected = self.recomputed_batch.expected
        return self.mask if expected is None else self.mask & ~expected.tokens

    def get_token_stream(self, name: str) -> Tensor:
        """A stored stream that every step has.

        Raises:
            ValueError: the step has no such stream.
        """
        tensor = self.rows.tokens[name]
        if tensor is None:
            raise ValueError(f"step {self.step} has no {name}")
        return tensor

    def collect_violations(
        self, what: str, stored: Tensor, expected: Tensor, wrong: Tensor, checked: int
    ) -> IdentityResult:
        """Collects the violations marked in `wrong`, per token (`[B, T]`) or per row (`[B]`)."""
        places = [tuple(place) for place in wrong.nonzero()[:VIOLATIONS_KEPT].tolist()]
        first = tuple(
            self.violation(
                what, _convert_to_scalar(stored[place]), _convert_to_scalar(expected[place]), *place
            )
            for place in places
        )
        return IdentityResult(checked, int(wrong.sum()), first)

    def violation(
        self, what: str, stored: Value, expected: Value, row: int, token: int | None = None
    ) -> Violation:
        """A violation of a row, or of one of its tokens."""
        turn = int(self.batch.turn_ids[row, token]) if token is not None else 0
        return Violation(
            step=self.step,
            tree=self.batch.rows[row].tree,
            row=row,
            turn=turn if turn > 0 else None,
            token=token,
            what=what,
            stored=stored,
            expected=expected,
        )


def _convert_to_scalar(value: Tensor) -> float | bool:
    number: float | bool = value.item()
    return number


RTOL = 1e-6
"""Tolerance for sums, whose order of addition depends on threads. Everything else is compared bit
for bit."""
_CENTRED = (Grpo, Uniform, DrGrpo, Rloo, Gpg, TwoLevel)
"""Estimators whose advantages have mean 0 within a group."""
_COMPARING = (*_CENTRED, Opo, PassAtK)
"""Estimators that use a row's score only relative to the scores of its group."""
Check = Callable[[StepEvidence], IdentityResult]


class Identity(NamedTuple):
    """A condition that must hold, with the function that checks it and the unit it counts."""

    name: str
    says: str
    unit: str
    check: Check


def _check_stored_scores(e: StepEvidence) -> IdentityResult:
    row_of = {
        (row.tree, turn): number for number, row in enumerate(e.batch.rows) for turn in row.turns
    }
    checked, wrong = 0, []
    for place, differing in _rescore_stored_rewards(
        e.stored.trees, e.stored.rewards, e.setup.rewards, e.pool
    ):
        checked += 1
        for what, before, after in differing:
            place_of = {"tree": place[0], "row": row_of.get(place)}
            turn = e.stored.trees[place[0]].segments[place[1]].turn
            violation = Violation(
                step=e.step, turn=turn, what=what, stored=before, expected=after, **place_of
            )
            wrong.append(violation)
    return IdentityResult.from_violations(checked, wrong)


def _check_reward_places(e: StepEvidence) -> IdentityResult:
    """Turn rewards are on turns of their kind, and global rewards on whole rollouts."""
    checked, wrong = 0, list[Violation]()
    for (tree, segment), name, belongs in _list_stored_rewards(e):
        checked += 1
        if belongs is not None:
            turn = e.stored.trees[tree].segments[segment]
            violation = Violation(
                step=e.step,
                tree=tree,
                turn=turn.turn,
                what=f"reward {name}",
                stored=f"given to a turn of kind {turn.kind}",
                expected=belongs,
            )
            wrong.append(violation)
    return IdentityResult.from_violations(checked, wrong)


def _check_turn_ids(e: StepEvidence) -> IdentityResult:
    """Turn ids count up without gaps, each on exactly the tokens of its turn, the last included."""
    checked, wrong = 0, []
    for number, row in enumerate(e.batch.rows):
        checked += len(row.turns)
        for turn, held, expected in _find_miscounted_turns(e, number):
            what = f"number of tokens with turn id {turn}"
            wrong.append(e.violation(what, held, expected, number))
        most = _get_turn_limit(e)
        if most is not None and len(row.turns) > most:
            wrong.append(e.violation("number of turns", len(row.turns), most, number))
    return IdentityResult.from_violations(checked, wrong)


def _check_masks(e: StepEvidence) -> IdentityResult:
    expected = e.setup.mask(e.batch)
    return e.collect_violations("mask", e.mask, expected, e.mask != expected, int(e.rows.own.sum()))


def _check_reward_mass(e: StepEvidence) -> IdentityResult:
    rewards = e.rewards
    reduce = e.setup.spec.credit.turn_reduce or e.setup.rules.placement.turn_reduce
    turns = torch.where(rewards.turn_present, rewards.turn_rewards, 0.0).double()
    count = rewards.turn_present.sum(dim=1).clamp(min=1) if reduce == "mean" else 1
    expected = turns.sum(dim=1) / count + rewards.global_rewards.double()
    found = (
        sum_token_rewards(e.get_token_stream("placed").double(), e.rows.own)
        + e.recomputed_batch.placed.lost.double()
    )
    # Rewards of opposite sign may cancel, so the tolerance scales with the sum of magnitudes.
    scale = turns.abs().sum(dim=1) + rewards.global_rewards.double().abs()
    wrong = ~((found - expected).abs() <= RTOL * scale)
    return e.collect_violations("placed and lost reward", found, expected, wrong, len(expected))


def _check_equal_scores(e: StepEvidence) -> IdentityResult:
    """Checks that groups with equal scores have zero advantages.

    Groups of one row are skipped, since they may get their raw score. So is `prompt_renorm`, whose
    second normalisation within the prompt leaves means of 0 only up to rounding.
    """
    again = isinstance(e.estimator, TwoLevel) and e.estimator.second_level == "prompt_renorm"
    if again or not (isinstance(e.estimator, _COMPARING) and _reads_one_score(e.estimator)):
        return IdentityResult(0)
    groups = _Groups.from_evidence(e)
    alike = (~has_score_spread(groups.highest, groups.lowest) & (groups.sizes > 1))[groups.slot]
    alike &= _find_group_rows(e)
    stored = e.get_token_stream("advantages")
    wrong = alike[:, None] & e.mask & (stored != 0)
    return e.collect_violations(
        "advantages", stored, torch.zeros_like(stored), wrong, int(alike.sum())
    )


def _check_group_means(e: StepEvidence) -> IdentityResult:
    """Checks that advantages of a group have mean 0.

    The rounding error comes from the scores and grows as their spread shrinks.
    """
    if not (isinstance(e.estimator, _CENTRED) and _reads_one_score(e.estimator)):
        return IdentityResult(0)
    groups, credited = _Groups.from_evidence(e), e.credited
    learns = credited.any(dim=1) & _find_group_rows(e)
    tokens = credited.sum(dim=1).clamp(min=1)
    per_row = sum_token_rewards(e.get_token_stream("advantages"), credited) / tokens
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
        e.violation(
            "mean advantage of the group", float(means[g]), 0.0, groups.slot.tolist().index(g)
        )
        for g in wrong[:VIOLATIONS_KEPT]
    ]
    return IdentityResult(int(looked_at.sum()), len(wrong), tuple(first))


def _check_outside_mask(e: StepEvidence) -> IdentityResult:
    return _check_zeros(e, e.rows.own & ~e.mask, ("advantages", "weights", "token_rewards"))


def _check_observations(e: StepEvidence) -> IdentityResult:
    """Observations have no mask, weight, advantage or KL if the mask covers policy tokens only."""
    if e.strategy.reaches_beyond():
        return IdentityResult(0)
    return _check_zeros(e, e.batch.is_environment, ("mask", "weights", "advantages", "kl"))


def _check_score_totals(e: StepEvidence) -> IdentityResult:
    found = [
        e.collect_violations(
            name, stored, expected, ~_is_nearly_equal(stored, expected), len(stored)
        )
        for name, expected in vars(e.recomputed_batch.scores).items()
        if (stored := e.rows.scores.get(name)) is not None
    ]
    return IdentityResult.join(max((one.checked for one in found), default=0), found)


# What the checks share ----------------------------------------------------------------------------
def _check_zeros(e: StepEvidence, where: Tensor, names: Sequence[str]) -> IdentityResult:
    """Checks that stored `[B, T]` streams are 0 at the tokens of `where`."""
    streams = {name: stored for name in names if (stored := e.rows.tokens[name]) is not None}
    found = [
        e.collect_violations(name, stored, torch.zeros_like(stored), where & (stored != 0), 0)
        for name, stored in streams.items()
    ]
    return IdentityResult.join(int(where.sum()), found)


def _find_miscounted_turns(e: StepEvidence, number: int) -> Iterator[tuple[int, int, int]]:
    """Turn ids of a row with a wrong number of tokens: id, tokens found, tokens expected."""
    row = e.batch.rows[number]
    segments = e.stored.trees[row.tree].segments
    before = 0 if row.parent == NO_PARENT else segments[row.parent].turn
    expected = {before + k: len(segments[s].token_ids) for k, s in enumerate(row.turns, start=1)}
    ids = e.batch.turn_ids[number]
    for turn in sorted({*expected, *ids[ids > 0].tolist()}):
        held, wanted = int((ids == turn).sum()), expected.get(turn, 0)
        if held != wanted:
            yield turn, held, wanted


def _get_turn_limit(e: StepEvidence) -> int | None:
    """Maximum turns of a rollout, the forced answer included; None if there is no limit."""
    rollout = e.setup.spec.rollout
    return rollout.last_turn if isinstance(rollout, MultiTurnRolloutSpec) else None


def _list_stored_rewards(e: StepEvidence) -> Iterator[tuple[Place, str, str | None]]:
    """Yields every stored reward that the spec names: its place, its name, and what it belongs to
    if it is misplaced, else None. Rewards of plugins that cannot be used here are not in the spec.
    """
    spec, trees, rewards = e.setup.spec.rewards, e.stored.trees, e.stored.rewards
    for (tree, segment), entries in rewards.turns.items():
        kind = trees[tree].segments[segment].kind
        for name in entries:
            if name in spec.turn:
                use = spec.turn[name]
                fits = use.fits(kind)
                yield (tree, segment), name, None if fits else f"for turns of kind {use.turn}"
            elif name in spec.global_:
                yield (tree, segment), name, "for whole rollouts"
    for (tree, segment), entries in rewards.rollouts.items():
        whole = segment in trees[tree].rollouts
        for name in entries:
            if name in spec.turn:
                yield (tree, segment), name, "for turns"
            elif name in spec.global_:
                yield (tree, segment), name, None if whole else "for whole rollouts"


def check_probe_scores(
    step: int, points: Sequence[StoredPoint], setup: PhaseSetup, pool: RewardPool
) -> IdentityResult:
    """Checks that rescoring the stored texts of a probe gives the stored scores.

    Args:
        step: step of the run.
        points: stored points of the probe.
        setup: setup of the base experiment, which probes use in every phase.
        pool: workers that score rewards.
    """
    level = setup.plan.levels[0]
    trees = [build_response_tree(p.problem, (), level, p.responses) for p in points]
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
    for (t, s), differing in _rescore_stored_rewards(trees, stored, setup.rewards, pool):
        checked += 1
        for what, before, after in differing:
            point = points[t]
            where = f"{point.scheme}, point {point.point}, sample {s - 1}, of {point.problem.id}"
            label = f"{what} ({where})"
            wrong.append(Violation(step=step, what=label, stored=before, expected=after))
    return IdentityResult.from_violations(checked, wrong)


def _rescore_stored_rewards(
    trees: Sequence[RolloutTree],
    stored: RewardTable,
    rewards: Sequence[NamedReward],
    pool: RewardPool,
) -> Iterator[tuple[Place, Iterator[tuple[str, Value, Value]]]]:
    """Yields each stored score's place with its differences from a new score.

    Rewards read by other rewards are taken as stored. Scores of failed scorers are skipped.
    """
    for reward, place, now in rescore_rollouts(trees, rewards, stored, pool):
        held = stored.turns if reward.scope == "turn" else stored.rollouts
        then = held.get(place, {}).get(reward.name)
        if then is None or not then.is_fault:
            yield place, _compare_reward_entries(reward.name, then, now)


def _compare_reward_entries(
    name: str, then: RewardEntry | None, now: RewardEntry
) -> Iterator[tuple[str, Value, Value]]:
    """Yields the differences between a stored score and a new one: name, stored, expected.

    Reasons are sentences of a plugin, and may be other ones in a later version.
    """
    if then is None:
        yield f"reward {name}", "nothing", _get_entry_value(now)
    elif (then.raw, then.status) != (now.raw, now.status):
        yield f"reward {name}", _get_entry_value(then), _get_entry_value(now)
    elif dict(then.parts) != dict(now.parts):
        yield f"parts of {name}", str(dict(then.parts)), str(dict(now.parts))
    elif then.weight != now.weight:
        yield f"weight of {name}", then.weight, now.weight


def _get_entry_value(entry: RewardEntry) -> Value:
    if entry.raw is not None:
        return entry.raw
    return f"absent: {entry.reason}" if entry.reason else "absent"


def _compare_token_stream(name: str, e: StepEvidence) -> IdentityResult:
    """Compares a stored `[B, T]` stream with the recomputed one, bit for bit where no sum depends
    on threads and no exponential on the CPU."""
    batch = e.recomputed_batch
    expected = batch.placed.token_rewards if name == "placed" else getattr(batch, name)
    of_kl = e.setup.spec.credit.kl_penalty not in ("k3", "low_var_kl")  # these have exponentials
    exact = {"placed": True, "weights": True, "kl": of_kl, "token_rewards": of_kl}.get(name, False)
    stored = e.rows.tokens[name]
    if stored is None or expected is None:
        if stored is None and expected is None:
            return IdentityResult(0)
        held, wanted = ("none", "one") if stored is None else ("one", "none")
        return IdentityResult(
            0, 1, (Violation(step=e.step, what=name, stored=held, expected=wanted),)
        )
    same = (stored == expected) | (stored.isnan() & expected.isnan())
    wrong = ~(same if exact else same | _is_nearly_equal(stored, expected))
    return e.collect_violations(name, stored, expected, wrong, int(e.mask.sum()))


@dataclass(frozen=True, eq=False)
class _Groups:
    """Groups of rows: `slot` `[B]` is each row's group; the other fields are `[G]`, per group."""

    slot: Tensor
    sizes: Tensor
    highest: Tensor
    lowest: Tensor

    @staticmethod
    def from_evidence(e: StepEvidence) -> "_Groups":
        scores = e.recomputed_batch.scores.total_score
        if e.setup.spec.credit.score_source == "token_rewards" and e.estimator.reads == "scores":
            scores = sum_token_rewards(e.recomputed_batch.token_rewards, e.mask)
        groups = assign_comparison_groups(
            e.batch.group_ids, e.batch.tree_ids, e.batch.levels, e.batch.is_confidence, e.estimator
        )
        _, slot, sizes = groups.unique(return_inverse=True, return_counts=True)
        return _Groups(slot, sizes, *compute_group_extremes(scores, slot, len(sizes)))


def _reads_one_score(estimator: Estimator) -> bool:
    """Whether the estimator compares rows by the scores that `_Groups` uses."""
    return estimator.reading() == "scores" or isinstance(estimator, Uniform)


def _find_group_rows(e: StepEvidence) -> Tensor:
    """`[B]` bool rows that are compared within their group: not confidences compared by label."""
    by_label = isinstance(e.estimator, TwoLevel) and e.estimator.confidence.baseline == "label"
    return ~e.batch.is_confidence | (not by_label)


def _is_nearly_equal(stored: Tensor, expected: Tensor) -> Tensor:
    """Equal up to the float32 rounding of a different order of addition."""
    scale = torch.where(expected.isfinite(), expected, 0.0).abs()
    slack = RTOL * scale.max() if scale.numel() else 0.0
    return (stored == expected) | ((stored - expected).abs() <= slack)


IDENTITIES = (
    Identity("scores", "stored scores match the plugins' for the stored text", "scores",
             _check_stored_scores),
    Identity("rewarded", "every reward belongs to an existing turn or rollout", "rewards",
             _check_reward_places),
    Identity("turns", "every turn has its own id, including the last", "turns", _check_turn_ids),
    Identity("masks", "the mask matches the strategy's", "tokens", _check_masks),
    Identity("mass", "placed plus lost reward equals the reward given", "rows", _check_reward_mass),
    Identity("placement", "rewards are where the placement puts them", "tokens",
             partial(_compare_token_stream, "placed")),
    Identity("kl", "KL matches the estimator's for the log-probabilities", "tokens",
             partial(_compare_token_stream, "kl")),
    Identity("token_rewards", "token rewards are placed rewards minus β·KL", "tokens",
             partial(_compare_token_stream, "token_rewards")),
    Identity("advantages", "advantages match the estimator's", "tokens",
             partial(_compare_token_stream, "advantages")),
    Identity("returns", "returns match the estimator's", "tokens",
             partial(_compare_token_stream, "returns")),
    Identity("weights", "weights match the loss's aggregation", "tokens",
             partial(_compare_token_stream, "weights")),
    Identity("equal_scores", "equal scores in a group get advantage exactly 0", "rows",
             _check_equal_scores),
    Identity("group_means", "advantages of a group have mean 0", "groups", _check_group_means),
    Identity("outside", "all values outside the mask are 0", "tokens", _check_outside_mask),
    Identity("observations", "observations have no weight, KL or advantage", "tokens",
             _check_observations),
    Identity("totals", "row scores are sums of their rewards", "rows", _check_score_totals),
)  # fmt: skip
"""In order of dependency: each identity relies on those before it."""
