"""Identities for the turns of a recorded step, and for the observations between them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlx.audit.replay import SHOWN, IdentityResult, StepEvidence, Violation
from rlx.reward import Place
from rlx.rollout import NO_PARENT
from rlx.spec import (
    AllResponse,
    Effective,
    EnvironmentRolloutSpec,
    Gigpo,
    Grpo,
    MtGrpo,
    MultiturnGrpo,
)

__all__ = [
    "check_observations",
    "check_response_mask",
    "check_reward_places",
    "check_turn_ids",
    "turn_advantages",
]


def check_observations(e: StepEvidence) -> IdentityResult:
    """Observations have no mask, weight, advantage or KL if the mask covers policy tokens only."""
    if e.strategy.reaches_beyond():
        return IdentityResult(0)
    observed, violated, first = e.batch.is_environment, 0, list[Violation]()
    for name in ("mask", "weights", "advantages", "kl"):
        stored = e.rows.tokens[name]
        if stored is not None:
            found = e.collect_violations(
                name, stored, torch.zeros_like(stored), observed & (stored != 0), 0
            )
            violated += found.violated
            first += found.first
    return IdentityResult(int(observed.sum()), violated, tuple(first[:SHOWN]))


def check_response_mask(e: StepEvidence) -> IdentityResult:
    """A mask that reaches beyond the policy's tokens covers the response, observations included.

    Reference:
        KG-R1, arXiv 2509.26383 (without state masking).
    """
    whole = isinstance(e.strategy, AllResponse | Effective) and e.strategy.reaches_beyond()
    if not whole:
        return IdentityResult(0)
    expected = e.batch.is_response
    return e.collect_violations("mask", e.mask, expected, e.mask != expected, int(expected.sum()))


def check_turn_ids(e: StepEvidence) -> IdentityResult:
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
    return IdentityResult(checked, len(wrong), tuple(wrong[:SHOWN]))


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
    rollout = e.recipe.spec.rollout
    if not isinstance(rollout, EnvironmentRolloutSpec):
        return None
    return rollout.max_turns + (rollout.forced_answer is not None)


def check_reward_places(e: StepEvidence) -> IdentityResult:
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
    return IdentityResult(checked, len(wrong), tuple(wrong[:SHOWN]))


def _list_stored_rewards(e: StepEvidence) -> Iterator[tuple[Place, str, str | None]]:
    """Yields every stored reward that the spec names: its place, its name, and what it belongs to
    if it is misplaced, else None. Rewards of plugins that cannot be used here are not in the spec.
    """
    spec, trees, rewards = e.recipe.spec.rewards, e.stored.trees, e.stored.rewards
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


def turn_advantages(e: StepEvidence) -> IdentityResult:
    """Under turn-level estimators, all tokens of a turn share that turn's advantage."""
    if isinstance(e.estimator, Grpo):
        looks = e.estimator.enable_multiturn_advantage
    else:
        looks = isinstance(e.estimator, MultiturnGrpo | MtGrpo | Gigpo)
    if not looks:
        return IdentityResult(0)
    stored = e.get_token_stream("advantages")
    expected, checked = _spread_turn_values(
        e.recomputed_batch.advantages, e.batch.turn_ids, e.credited
    )
    learns = e.credited & (e.batch.turn_ids > 0)
    slack = 1e-6 * expected.abs().max()
    wrong = learns & ~((stored - expected).abs() <= slack)
    return e.collect_violations("advantages", stored, expected, wrong, checked)


def _spread_turn_values(values: Tensor, turn_ids: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    """`[B, T]` the value of each turn's first masked-in token, spread over its masked-in tokens;
    and the number of turns that have one."""
    spread, count = torch.zeros_like(values), 0
    for turn in turn_ids[mask & (turn_ids > 0)].unique().tolist():
        here = mask & (turn_ids == turn)
        has = here.any(dim=1)
        first = values.gather(1, here.int().argmax(dim=1, keepdim=True))
        spread = torch.where(here, first, spread)
        count += int(has.sum())
    return spread, count
