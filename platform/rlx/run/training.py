"""Runs one training step: samples, scores, assigns credit by `rlx.step`, updates and records."""

import time
from dataclasses import dataclass

from rlx.credit_assignment import build_scored_rows, split_mini_batches
from rlx.errors import DivergedModelError
from rlx.learner import CriticStats, UpdateStats, critic_rate
from rlx.phase_setup import PhaseSetup
from rlx.record import Recorder, Role
from rlx.reward import RewardTable
from rlx.rollout import build_piece_splitter, is_fault_segment
from rlx.run.collect import StepRollouts, collect_rollouts
from rlx.run.context import ControllerState, RunContext
from rlx.run.metrics import GpuPeaks, compute_mismatch_figures, step_figures
from rlx.run.streams import (
    StepInputs,
    build_trained_rows,
    compute_old_logprobs,
    compute_optional_streams,
)
from rlx.run.weight_sync import compute_sync_figures, synchronize_sampler
from rlx.spec import CriticSpec, ExperimentSpec, OptimizerSpec
from rlx.step import assign_credit
from rlx.train_batch import TokenStreams, TrainBatch


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a training step.

    Attributes:
        figures: metrics of the step; empty if no rollout could be scored.
        drawn: number of problems drawn.
        controllers: state for the next step.
    """

    figures: dict[str, float]
    drawn: int
    controllers: ControllerState

    def select_progress_figures(self, spec: ExperimentSpec) -> dict[str, float]:
        """The metrics to show as progress."""
        correct = spec.evaluation.correct
        taught = ["kl/reference"] if spec.learns_from_teacher else []
        names = (f"rewards/{correct}/mean", "calibration/brier", *taught, "perf/step_s")
        return {name: self.figures[name] for name in names if name in self.figures}


def train_step(
    context: RunContext,
    setup: PhaseSetup,
    phase: str,
    step: int,
    cursor: int,
    rate: float,
    controllers: ControllerState,
) -> StepOutcome:
    """Samples, scores, assigns credit, updates the models and records the step.

    Args:
        step: number of the step, from 1.
        cursor: number of problems drawn before.
        rate: learning rate.
        controllers: state from the previous step.
    """
    peaks, began = GpuPeaks(context.ranks.device), time.perf_counter()
    try:
        rollouts = collect_rollouts(context, setup, cursor)
    except DivergedModelError as error:
        raise DivergedModelError(
            f"step {step}: {error}; `rlx export` writes the last checkpoint that is sound"
        ) from error
    waited = time.perf_counter() - began
    peaks.end("sampling")
    rows = build_scored_rows(
        setup, rollouts.trees, rollouts.table, without=rollouts.find_untrained_rows()
    )
    if rows is None:
        _record_skipped_step(context, step, rollouts)
        return StepOutcome({}, rollouts.drawn, controllers)
    context.progress.show_activity("update")
    inputs = StepInputs(context, setup, rows, rollouts, cursor)
    train = assign_credit(rows, _compute_streams(inputs, controllers), setup.rules)
    updates, critic = _update_models(context, setup, train, rate, controllers)
    ended = time.perf_counter()
    peaks.end("update")
    seconds = {
        "rollout": rollouts.sampled,
        "reward": rollouts.scored,
        "wait": waited,
        "train": ended - began - waited,
        "step": ended - began,
    }
    first, last = (updates[0], updates[-1]) if updates else (None, None)
    figures = {
        **peaks.figures,
        **step_figures(
            rollouts.trees,
            rollouts.table,
            train,
            last,
            critic,
            seconds,
            context.spec.evaluation.correct,
            setup.spec.rollout.turns,
            players=setup.plan.trees_per_prompt,
        ),
        "rollout/filtered": float(len(rollouts.filtered)),
        **compute_sync_figures(context.sampler),
        **compute_mismatch_figures(train, setup.spec.loss, first, context.learner.logprobs),
    }
    if rollouts.dropped is not None:
        figures["prompts/dropped"] = float(rollouts.dropped)
    figures |= context.cpu.take("sample", "score", "learn") | context.cpu.take_rest()
    if context.recorder is not None:
        _record_training_step(context, context.recorder, phase, step, figures, inputs, train)
    controllers = controllers.after(train, setup.spec, with_critic=critic is not None)
    return StepOutcome(figures, rollouts.drawn, controllers)


def _compute_streams(inputs: StepInputs, controllers: ControllerState) -> TokenStreams:
    """Computes what estimator and loss read; frees the sampler's memory for the learner."""
    context = inputs.context
    with context.cpu.measure("sample"):
        sampled = compute_optional_streams(inputs, by_sampling=True)
    context.sampler.release()
    with context.cpu.measure("learn"):
        return TokenStreams(
            old_logprobs=compute_old_logprobs(inputs),
            optional=sampled | compute_optional_streams(inputs, by_sampling=False),
            beta=controllers.kl.beta,
            state=controllers.states.get(inputs.setup.spec.estimator.plugin, {}),
        )


def _update_models(
    context: RunContext,
    setup: PhaseSetup,
    train: TrainBatch,
    rate: float,
    controllers: ControllerState,
) -> tuple[list[UpdateStats], CriticStats | None]:
    """Updates the critic, then the policy unless it is still in the critic's lead steps.

    Returns:
        The statistics of the policy's optimiser steps, empty if no token carried a signal, and
        those of the critic's last update.
    """
    spec, critic_stats = context.spec.critic, None
    with context.cpu.measure("learn"):
        if context.critic is not None and spec is not None and "values" in setup.needs:
            for part in _list_updates(setup, train, spec):
                its_rate = critic_rate(spec, controllers.critic)
                critic_stats = context.critic.update(part, its_rate) or critic_stats
            if controllers.critic < spec.lead_steps:
                return [], critic_stats
        parts = _list_updates(setup, train, setup.spec.optimizer)
        updates = [context.learner.update(part, setup.spec.loss, rate) for part in parts]
        synchronize_sampler(context)
        return [update for update in updates if update is not None], critic_stats


def _list_updates(
    setup: PhaseSetup, train: TrainBatch, spec: OptimizerSpec | CriticSpec
) -> list[TrainBatch]:
    """What each optimizer step on a batch of rollouts learns from, in order."""
    return split_mini_batches(train, spec.mini_batches, setup.rules) * spec.updates_per_rollout


def _record_skipped_step(context: RunContext, step: int, rollouts: StepRollouts) -> None:
    table = rollouts.table
    entries = (e for es in (*table.turns.values(), *table.rollouts.values()) for e in es.values())
    scorers = (e.reason for e in entries if e.status == "absent" and e.reason)
    why = next((f"; first scoring failure: {reason}" for reason in scorers), "")
    for fault in (s.info for t in rollouts.trees for s in t.segments if is_fault_segment(s)):
        why = f"; the {fault.get('by', 'environment')} failed: {fault['fault']}"
        break
    message = f"step {step} learned nothing: no rollout could be scored{why}"
    if context.recorder:
        context.recorder.announce("step_skipped", message)


def _record_training_step(
    context: RunContext,
    recorder: Recorder,
    phase: str,
    step: int,
    figures: dict[str, float],
    inputs: StepInputs,
    train: TrainBatch,
) -> None:
    rollouts = inputs.rollouts
    trees, table = rollouts.trees, rollouts.table
    roles: list[Role] = [
        "filtered" if t in rollouts.filtered else "trained" for t in range(len(trees))
    ]
    if rollouts.greedy is not None:
        numbers = [range(len(trees)), range(len(trees), 2 * len(trees))]
        table = RewardTable.merge_tables([table, rollouts.greedy.table], numbers)
        trees = [*trees, *rollouts.greedy.trees]
        roles += ["greedy"] * len(rollouts.greedy.trees)
    recorder.step(
        step,
        figures,
        trees,
        table,
        build_trained_rows(train),
        {  # what is needed to recompute the step's credit, besides its rows
            "phase": phase,
            "rows": len(train.batch.rows),
            "tokens": int(train.batch.is_token.sum()),
            "beta": train.streams.beta,
            "state_before": dict(train.streams.state),
            "state": dict(train.state),
            "max_tokens": dict(inputs.setup.max_tokens),
        },
        context.folder.rollouts(step),
        roles,
        pieces=build_piece_splitter(context.policy.dialogue),
    )
