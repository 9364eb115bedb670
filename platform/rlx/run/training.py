"""Runs one training step: the algorithm of `rlx.step`, with its models and its records."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlx.batch import TokenBatch, build_token_batch, list_batch_rows
from rlx.credit import fill_between_ends
from rlx.errors import DivergedModelError, SpecError
from rlx.learner import CriticStats, UpdateStats, critic_rate
from rlx.recipe import Recipe
from rlx.record import Role
from rlx.reward import RewardTable
from rlx.rollout import RolloutTree, build_piece_splitter, is_fault_segment
from rlx.row_rewards import build_row_rewards
from rlx.run.collect import StepRollouts, collect_rollouts
from rlx.run.controller_state import ControllerState
from rlx.run.off_policy import off_policy_figures
from rlx.run.state_values import mc_streams
from rlx.run.step_metrics import step_figures
from rlx.run.trained_rows import build_trained_rows
from rlx.run.training_context import TrainingContext
from rlx.run.weight_sync import compute_sync_figures, synchronize_sampler
from rlx.spec import CriticSpec, OptimizerSpec
from rlx.step import TokenStreams, TrainBatch, assign_credit, split_mini_batches

__all__ = ["StepOutcome", "train_step"]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a training step.

    Attributes:
        figures: metrics of the step; empty if no rollout could be scored.
        drawn: number of problems drawn.
        carried: state for the next step.
    """

    figures: dict[str, float]
    drawn: int
    carried: ControllerState

    def select_progress_figures(self, correct: str) -> dict[str, float]:
        """The metrics to show as progress."""
        names = (f"rewards/{correct}/mean", "calibration/brier", "perf/step_s")
        return {name: self.figures[name] for name in names if name in self.figures}


def train_step(
    context: TrainingContext,
    recipe: Recipe,
    phase: str,
    step: int,
    cursor: int,
    rate: float,
    carried: ControllerState,
    *,
    more: bool,
) -> StepOutcome:
    """Samples, scores, assigns credit, updates the models and records the step.

    Args:
        step: number of the step, from 1.
        cursor: number of problems drawn before.
        rate: learning rate.
        carried: state from the previous step.
        more: whether the phase has another step, whose rollouts may be prefetched.
    """
    began = time.perf_counter()
    rollouts = _take_rollouts(context, recipe, step, cursor)
    sampled = time.perf_counter()
    out = rollouts.find_untrained_rows()
    if len(out) == len(list_batch_rows(rollouts.trees)):
        _record_skipped_step(context, step, rollouts)
        return StepOutcome({}, rollouts.drawn, carried)
    context.progress.show_activity("update")
    batch = build_token_batch(rollouts.trees, temperatures=recipe.temperatures, without=out)
    states = mc_streams(context, recipe, batch, rollouts.trees, cursor) if recipe.wants_mc else None
    if more and recipe.spec.rollout.off_policy_steps:  # this step is done with the sampler
        context.prefetcher.begin(context, recipe, cursor + rollouts.drawn, step - 1)
    mask = recipe.mask(batch)
    train = assign_credit(
        batch,
        build_row_rewards(batch, rollouts.trees, rollouts.table),
        mask,
        _build_streams(context, recipe, batch, mask, rollouts, carried, states),
        estimator=recipe.estimator,
        credit=recipe.spec.credit,
        loss=recipe.spec.loss,
        max_tokens=recipe.max_tokens,
    )
    updates, critic = _update_models(context, recipe, train, carried.critic, rate)
    ended = time.perf_counter()
    seconds = {
        "rollout": rollouts.sampled,
        "reward": rollouts.scored,
        "wait": sampled - began,
        "train": ended - sampled,
        "step": ended - began,
    }
    figures = _compute_step_figures(
        context, recipe, step, rollouts, train, updates, critic, seconds
    )
    _record_training_step(context, phase, step, figures, rollouts, train, recipe)
    carried = carried.after(train, recipe.spec, with_critic=critic is not None)
    return StepOutcome(figures, rollouts.drawn, carried)


def _take_rollouts(
    context: TrainingContext, recipe: Recipe, step: int, cursor: int
) -> StepRollouts:
    """The step's rollouts: prefetched, or sampled now."""
    try:
        return context.prefetcher.take(context) or collect_rollouts(
            context, recipe, cursor, step - 1
        )
    except DivergedModelError as error:
        raise DivergedModelError(
            f"step {step}: {error}; `rlx export` writes the last checkpoint that is sound"
        ) from error


def _build_streams(
    context: TrainingContext,
    recipe: Recipe,
    batch: TokenBatch,
    mask: Tensor,
    rollouts: StepRollouts,
    carried: ControllerState,
    states: tuple[Tensor, Tensor] | None,
) -> TokenStreams:
    """Computes log-probabilities and values of the trained tokens, each only if it is needed."""
    old = batch.behaviour_logprobs
    if recipe.spec.loss.old_logprobs == "learner":
        old = context.learner.logprobs(batch, mask)
    elif (mask & ~batch.is_own).any():
        raise SpecError(
            f"mask strategy {recipe.spec.mask.plugin!r} trains on tokens that the policy did not "
            "generate and that have no behaviour log-probabilities: set loss.old_logprobs: "
            "learner"
        )
    reference = context.reference if recipe.wants_reference else None
    greedy = None
    if rollouts.greedy is not None:
        rewards = [
            _greedy_score(rollouts.greedy.trees, rollouts.greedy.table, t)
            for t in _list_tree_ids(batch)
        ]
        greedy = torch.tensor(rewards)
    steps, values = states or (None, None)
    return TokenStreams(
        old_logprobs=old,
        reference_logprobs=reference.logprobs(batch, mask) if reference else None,
        # Also between two trained tokens, where the literal recursion of GAE reads them.
        values=context.critic.values(batch, fill_between_ends(mask))
        if context.critic and recipe.wants_values
        else None,
        greedy_scores=greedy,
        step_ids=steps,
        mc_values=values,
        beta=carried.kl.beta,
        state=carried.states.get(recipe.spec.estimator.plugin, {}),
    )


def _list_tree_ids(batch: TokenBatch) -> list[int]:
    trees: list[int] = batch.tree_ids.tolist()
    return trees


def _greedy_score(trees: Sequence[RolloutTree], table: RewardTable, tree: int) -> float:
    """Structured score of the greedy answer to a tree's prompt."""
    place = (tree, trees[tree].policy_segments[0])
    return (table.get_turn_total(place) or 0.0) + (table.get_rollout_total(place) or 0.0)


def _update_models(
    context: TrainingContext, recipe: Recipe, train: TrainBatch, critic_steps: int, rate: float
) -> tuple[list[UpdateStats], CriticStats | None]:
    """Updates the critic, then the policy unless it is still in the critic's lead steps.

    Args:
        critic_steps: number of steps in which the critic was trained before.

    Returns:
        The statistics of the policy's optimiser steps, empty if no token carried a signal, and
        those of the critic's last update.
    """
    spec, critic_stats = context.spec.critic, None
    if context.critic is not None and spec is not None and recipe.wants_values:
        for part in _list_updates(recipe, train, spec):
            rate_now = critic_rate(spec, critic_steps)
            critic_stats = context.critic.update(part, rate_now) or critic_stats
        if critic_steps < spec.lead_steps:
            return [], critic_stats
    parts = _list_updates(recipe, train, recipe.spec.optimizer)
    updates = [context.learner.update(part, recipe.spec.loss, rate) for part in parts]
    if not context.prefetcher.uses_sampler:
        synchronize_sampler(context)
    return [update for update in updates if update is not None], critic_stats


def _list_updates(
    recipe: Recipe, train: TrainBatch, spec: OptimizerSpec | CriticSpec
) -> list[TrainBatch]:
    """What each optimizer step on a batch of rollouts learns from, in order."""
    loss, max_tokens = recipe.spec.loss, recipe.max_tokens
    parts = split_mini_batches(train, spec.mini_batches, loss=loss, max_tokens=max_tokens)
    return parts * spec.updates_per_rollout


def _compute_step_figures(
    context: TrainingContext,
    recipe: Recipe,
    step: int,
    rollouts: StepRollouts,
    train: TrainBatch,
    updates: Sequence[UpdateStats],
    critic: CriticStats | None,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """All metrics of a step, except the time that recording it takes."""
    first, last = (updates[0], updates[-1]) if updates else (None, None)
    correct, turns = context.spec.evaluation.correct, recipe.spec.rollout.turns
    return {
        **step_figures(
            rollouts.trees, rollouts.table, train, last, critic, seconds, correct, turns
        ),
        "rollout/filtered": float(len(rollouts.filtered)),
        **compute_sync_figures(context.sampler),
        **off_policy_figures(
            train,
            recipe.spec.loss,
            first,
            step - 1 - rollouts.sampled_after,
            context.learner.logprobs,
        ),
    }


def _record_skipped_step(context: TrainingContext, step: int, rollouts: StepRollouts) -> None:
    table = rollouts.table
    entries = (e for es in (*table.turns.values(), *table.rollouts.values()) for e in es.values())
    scorers = (e.reason for e in entries if e.status == "absent" and e.reason)
    why = next((f"; first scoring failure: {reason}" for reason in scorers), "")
    for fault in (
        s.info["fault"] for t in rollouts.trees for s in t.segments if is_fault_segment(s)
    ):
        why = f"; the environment failed: {fault}"
        break
    message = f"step {step} learned nothing: no rollout could be scored{why}"
    if context.recorder:
        context.recorder.event("step_skipped", message, level="warning")
        print(message, flush=True)


def _record_training_step(
    context: TrainingContext,
    phase: str,
    step: int,
    figures: dict[str, float],
    rollouts: StepRollouts,
    train: TrainBatch,
    recipe: Recipe,
) -> None:
    if context.recorder is None:
        return
    context.progress.show_activity("commit")
    began = time.perf_counter()
    trees, table = rollouts.trees, rollouts.table
    roles: list[Role] = [
        "filtered" if t in rollouts.filtered else "trained" for t in range(len(trees))
    ]
    if rollouts.greedy is not None:
        numbers = [range(len(trees)), range(len(trees), 2 * len(trees))]
        table = RewardTable.merge_tables([table, rollouts.greedy.table], numbers)
        trees = [*trees, *rollouts.greedy.trees]
        roles += ["greedy"] * len(rollouts.greedy.trees)
    context.recorder.step(
        step,
        figures,
        trees,
        table,
        build_trained_rows(train),
        _build_step_statistics(train, phase, recipe, rollouts.sampled_after),
        context.folder.rollouts(step),
        roles,
        pieces=build_piece_splitter(context.policy.dialogue),
    )
    context.recorder.record_durations(step, {"perf/record_s": time.perf_counter() - began})


def _build_step_statistics(
    train: TrainBatch, phase: str, recipe: Recipe, sampled_after: int
) -> dict[str, Any]:
    """The values that are needed to recompute the step's credit, besides its rows."""
    return {
        "phase": phase,
        "sampled_after": sampled_after,
        "rows": len(train.batch.rows),
        "tokens": int(train.batch.is_token.sum()),
        "beta": train.streams.beta,
        "state_before": dict(train.streams.state),
        "state": dict(train.state),
        "max_tokens": dict(recipe.max_tokens),
    }
