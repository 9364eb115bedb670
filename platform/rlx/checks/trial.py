"""Problems of an experiment that show only when rollouts run through it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from rlx.batch import NO_TURN
from rlx.checks.trial_turns import (
    build_plugin_fault,
    check_trial_environment,
    check_turn_level,
    format_quote,
)
from rlx.reward import NamedReward, RewardEntry
from rlx.spec import EVERY_TURN, KeyPath, TurnReward
from rlx.spec.reading import Diagnostic, build_error, build_warning
from rlx.text import pluralize_noun
from rlx.train_batch import RowRewards, TrainBatch
from rlx.trial import Place, PlanTrial, describe_row_kind

__all__ = ["check_trial"]


def check_trial(trial: PlanTrial) -> Iterator[Diagnostic]:
    """Yields errors and warnings about one phase.

    Where placeholders stand in for the problems, a plugin's failure is only a warning.
    """
    plan, stand_ins = trial.recipe.plan, bool(trial.note)
    for number, level in enumerate(plan.levels):
        yield from check_turn_level(trial, level, is_first=number == 0)
    if plan.talk is not None:
        yield from check_trial_environment(trial, plan.talk, stand_ins=stand_ins)
    for reward in trial.recipe.rewards:
        yield from _check_trial_reward(trial, reward, stand_ins)
    if trial.train is None or trial.rewards is None:
        if not trial.is_faulty:
            yield _build_stop_diagnostic(trial)
        return
    yield from _check_trial_mask(trial, trial.train, trial.rewards)
    yield from _check_trial_advantages(trial, trial.train)
    if not trial.is_faulty:  # after a fault, the other findings mean little
        yield from _check_group_signal(trial.train)


def _build_stop_diagnostic(trial: PlanTrial) -> Diagnostic:
    if trial.rewards is None:
        return build_error(("rewards",), f"nothing can be learned: {trial.stopped}")
    return build_error(("credit", "on_missing_turn"), trial.stopped)


# Rewards -----------------------------------------------------------------------------------------


def _check_trial_reward(
    trial: PlanTrial, reward: NamedReward, stand_ins: bool
) -> Iterator[Diagnostic]:
    path: KeyPath = ("rewards", reward.scope, reward.name)
    entries = list(_list_reward_entries(trial, reward))
    fault = next(((p, e) for p, e in entries if e.is_fault), None)
    if fault is not None:
        yield _build_reward_diagnostic(trial, reward, *fault, path=path, stand_ins=stand_ins)
        return
    absent = all(e.raw is None for _, e in entries)
    if absent and not trial.is_faulty and not reward.name.startswith("_"):
        kind = reward.use.turn if isinstance(reward.use, TurnReward) else "rollout"
        where = "turn" if kind == EVERY_TURN else kind
        yield build_warning(
            path,
            f"rewards.{reward.scope}.{reward.name} has a weight of {reward.use.weight:g} on a "
            f"reward that no synthetic {where} produces",
            f"check that {reward.use.plugin!r} fits the task's records and this turn, or drop it",
        )


def _list_reward_entries(
    trial: PlanTrial, reward: NamedReward
) -> Iterator[tuple[Place, RewardEntry]]:
    table = trial.table
    places: Mapping[Place, Mapping[str, RewardEntry]] = (
        table.rollouts if reward.scope == "global" else table.turns
    )
    for place, entries in places.items():
        if reward.name in entries:
            yield place, entries[reward.name]


def _build_reward_diagnostic(
    trial: PlanTrial,
    reward: NamedReward,
    place: Place,
    entry: RewardEntry,
    *,
    path: KeyPath,
    stand_ins: bool,
) -> Diagnostic:
    segment = trial.trees[place[0]].segments[place[1]]
    fault = build_plugin_fault(
        f"reward plugin {reward.use.plugin!r} (rewards.{reward.scope}.{reward.name})",
        entry.reason or "it returned nothing",
        f"its input: {format_quote(segment.text)}",
        path=path,
        handled="continue without the score",
        lenient=reward.use.on_error != "fail",
        stand_ins=stand_ins,
    )
    return replace(fault, helps=(f"rlx plugins check {reward.use.plugin}",))


# Credit ------------------------------------------------------------------------------------------


def _check_trial_mask(
    trial: PlanTrial, train: TrainBatch, rewards: RowRewards
) -> Iterator[Diagnostic]:
    name = trial.recipe.spec.mask.plugin
    if not train.mask.any():
        yield build_error(
            ("mask",),
            f"mask strategy {name!r} selects no token of any synthetic response",
            "check the spans that the turns declare, and the strategy's `fallback`",
        )
        return
    for kind, learns in _find_learning_kinds(trial, train).items():
        if not learns:
            message = f"mask strategy {name!r} selects no token of a synthetic {kind}"
            yield build_warning(("mask",), message)
    lost = float(train.placed.lost.abs().sum())
    total = float(rewards.turn_rewards.abs().sum() + rewards.global_rewards.abs().sum())
    if lost and total:
        yield build_warning(
            ("credit", "on_missing_turn"),
            f"{lost / total:.0%} of the reward is placed on no token: the mask selects no token "
            "of the turns that earned it",
            "use `on_missing_turn: to_last_token` to keep it, or widen the mask",
        )
    foreign = train.mask & (train.batch.turn_ids == NO_TURN)
    if foreign.any() and trial.recipe.spec.loss.old_logprobs == "behaviour":
        yield build_error(
            ("mask",),
            f"mask strategy {name!r} selects tokens that the policy did not write: their "
            "behaviour log-probabilities are unknown",
            "loss.old_logprobs: learner",
        )


def _find_learning_kinds(trial: PlanTrial, train: TrainBatch) -> dict[str, bool]:
    """Maps each kind of turn to whether any of its tokens learns."""
    learning: dict[str, bool] = {}
    for b, row in enumerate(train.batch.rows):
        for place in row.turns:
            turn = trial.trees[row.tree].segments[place]
            own = train.mask[b] & (train.batch.turn_ids[b] == turn.turn)
            learning[turn.kind] = learning.get(turn.kind, False) or bool(own.any())
    return learning


def _check_trial_advantages(trial: PlanTrial, train: TrainBatch) -> Iterator[Diagnostic]:
    name = trial.recipe.spec.estimator.plugin
    if not torch.isfinite(train.advantages).all():
        message = f"estimator plugin {name!r} returns advantages that are not finite"
        yield build_error(("estimator",), message, kind="plugin")
    elif (train.advantages[~train.mask] != 0).any():
        message = f"estimator plugin {name!r} returns advantages for tokens outside the mask"
        yield build_error(("estimator",), message, kind="plugin")


def _check_group_signal(train: TrainBatch) -> Iterator[Diagnostic]:
    """Reports levels of rows in which no group has a signal."""
    if not train.mask.any():
        return
    for level in range(int(train.batch.levels.max()) + 1):
        rows = train.batch.levels == level
        if not rows.any():
            continue
        kind = describe_row_kind([row for row in train.batch.rows if row.level == level])
        # Groups of one are reported when the spec is read.
        alone = len(train.batch.group_ids[rows].unique()) == int(rows.sum())
        if alone or not train.mask[rows].any() or (train.advantages[rows] != 0).any():
            continue
        scores = train.scores.total_score[rows]
        alike = bool((scores == scores[0]).all())
        why = f"every {kind} scored {float(scores[0]):g}" if alike else "all groups are tied"
        yield build_warning(
            ("rewards",),
            f"no group of synthetic {pluralize_noun(kind)} has a signal: {why}, so every advantage "
            "is 0",
            "check the rewards below: do they distinguish good responses from poor ones?",
        )
