"""One step of training: collects rollouts, computes what estimator and loss read of their tokens,
assigns credit by `rlx.step`, updates the models and records the step.

`rlx_registry.STREAMS` lists what may be computed, and `rlx.discovery` names the function of each
provider.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlx.agents import build_rollout_host
from rlx.batch import build_token_batch, list_batch_rows
from rlx.credit import (
    compute_group_extremes,
    fill_between_ends,
    has_score_spread,
    structured_scores,
)
from rlx.discovery import import_implementation, list_providers
from rlx.errors import DivergedModelError, SpecError
from rlx.model import Policy
from rlx.phase_setup import PhaseSetup
from rlx.plugin import Problem, Task
from rlx.plugin_calls import show_plugin_output
from rlx.probe import ProbeContext, build_probe_response, state_values
from rlx.record import Recorder, Role, TrainedRows
from rlx.reward import RewardPool, RewardTable, score_rollouts
from rlx.rollout import (
    DrawnProblems,
    PromptFit,
    RolloutPlan,
    RolloutTree,
    Sampler,
    build_piece_splitter,
    is_fault_segment,
    sample_rollout_trees,
)
from rlx.run.context import ControllerState, RunContext
from rlx.run.metrics import GpuPeaks, compute_mismatch_figures, step_figures
from rlx.run.weight_sync import compute_sync_figures, synchronize_sampler
from rlx.seeding import derive_seed
from rlx.spec import CriticSpec, ExperimentSpec, OptimizerSpec
from rlx.step import (
    ScoredRows,
    TokenStreams,
    TrainBatch,
    assign_credit,
    build_scored_rows,
    compute_answer_scores,
    find_lost_rows,
    join_row_rewards,
    split_mini_batches,
)

if TYPE_CHECKING:  # DeepSpeed takes seconds to import, and evaluations have no use for it
    from rlx.learner import CriticStats, UpdateStats

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ScoredTrees:
    """Trees with their rewards, of one rank or of all, and the seconds that this rank took."""

    trees: list[RolloutTree]
    table: RewardTable
    sampled: float
    scored: float


@dataclass(frozen=True, slots=True)
class StepRollouts(ScoredTrees):
    """All rollouts sampled for one step, in the order in which their problems were drawn.

    Attributes:
        greedy: one greedily sampled tree for each of `trees`; None if no estimator needs them.
        filtered: positions of trees excluded from training, because they carry no signal or came
            after there were enough.
        drawn: number of problems drawn, with those that were dropped for their length.
        dropped: how many problems were left out because their prompts were too long; None if
            nothing limits them.
        need_rewards: whether a rollout without a reward is not trained on.
    """

    greedy: ScoredTrees | None
    filtered: frozenset[int]
    drawn: int
    dropped: int | None = None
    need_rewards: bool = True

    def find_untrained_rows(self) -> set[Place]:
        """Rows excluded from training: unscored, dropped, filtered or without a greedy baseline."""
        out = find_lost_rows(self.trees, self.table, needs_reward=self.need_rewards)
        excluded = set(self.filtered)
        if self.greedy is not None:
            excluded |= {t for t, _ in find_lost_rows(self.greedy.trees, self.greedy.table)}
        return out | {
            (r.tree, r.segment) for r in list_batch_rows(self.trees) if r.tree in excluded
        }


@dataclass(frozen=True, eq=False, slots=True)
class StepInputs:
    """What the provider of a stream reads."""

    context: RunContext
    setup: PhaseSetup
    rows: ScoredRows
    rollouts: StepRollouts
    cursor: int


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
    """Samples, scores, assigns credit, updates the models and records step `step`, from 1; `cursor`
    is the number of problems drawn before."""
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
        TrainedRows.from_batch(train),
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


def collect_rollouts(context: RunContext, setup: PhaseSetup, cursor: int) -> StepRollouts:
    """Draws, samples and scores the rollouts of a step.

    Dynamic sampling draws until `prompts_per_step` trees carry a signal or `max_batches` is
    reached. If no tree carries a signal, the step keeps its first draw. All ranks see all trees, so
    they make the same decision.
    """
    rollout = setup.spec.rollout
    count, dynamic = rollout.prompts_per_step, rollout.dynamic_sampling
    parcels: list[ScoredTrees] = []
    draws: list[DrawnProblems] = []
    good: list[int] = []
    examined = 0
    for batch in range(dynamic.max_batches if dynamic else 1):
        start = cursor + examined
        drawn, seeds = _draw_train_problems(context.policy, setup, start, count, "rollout")
        parcel = sample_and_score(context, setup, setup.plan, drawn.problems, seeds)
        good += [batch * count + t for t in _find_signal_trees(parcel)] if dynamic else []
        parcels.append(parcel)
        draws.append(drawn)
        examined += drawn.examined
        if len(good) >= count:
            break
    trees = [tree for parcel in parcels for tree in parcel.trees]
    numbers = iter(range(len(trees)))
    places = [[next(numbers) for _ in parcel.trees] for parcel in parcels]
    kept = set(good[:count]) or set(range(count * setup.plan.trees_per_prompt))
    everyone, greedy = list(parcels), None
    if "greedy_scores" in setup.needs:  # of each problem one tree of the most likely tokens
        plan = setup.plan.copy_with_sampling(1, top_k=1)
        problems = [problem for drawn in draws for problem in drawn.problems]
        seeds = [
            derive_seed(context.spec.seed, "greedy", n) for drawn in draws for n in drawn.numbers
        ]
        greedy = sample_and_score(context, setup, plan, problems, seeds)
        everyone.append(greedy)
    return StepRollouts(
        trees=trees,
        table=RewardTable.merge_tables([parcel.table for parcel in parcels], places),
        greedy=greedy,
        filtered=frozenset(range(len(trees))) - kept,
        drawn=examined,
        sampled=sum(parcel.sampled for parcel in everyone),
        scored=sum(parcel.scored for parcel in everyone),
        dropped=sum(drawn.dropped for drawn in draws) if rollout.max_prompt_tokens else None,
        need_rewards=setup.spec.learns_from_rewards,
    )


def _find_signal_trees(parcel: ScoredTrees) -> list[int]:
    """Trees that carry a signal: the scores of some group differ."""
    table = parcel.table
    without = find_lost_rows(parcel.trees, table)
    if len(without) == len(list_batch_rows(parcel.trees)):
        return []
    batch = build_token_batch(parcel.trees, without=without)
    rewards = join_row_rewards(batch, parcel.trees, table, batch.is_own).rewards
    scores = structured_scores(rewards.turn_rewards, rewards.turn_present, rewards.global_rewards)
    _, slot = batch.group_ids.unique(return_inverse=True)
    highest, lowest = compute_group_extremes(scores, slot, int(slot.max()) + 1)
    trees: list[int] = batch.tree_ids[has_score_spread(highest, lowest)[slot]].unique().tolist()
    return trees


def sample_and_score(
    context: RunContext,
    setup: PhaseSetup,
    plan: RolloutPlan,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    show: Callable[[int], None] | None = None,
) -> ScoredTrees:
    """Samples and scores each rank's share; returns all trees, in the order of the problems.

    Args:
        show: called with how many problems are answered, as far as this rank's share tells.
    """
    turns = len(range(context.ranks.rank, len(problems), context.ranks.count)) * plan.most_turns
    ended = 0

    def show_answered(more: int) -> None:
        nonlocal ended
        ended += more
        if show is not None:
            show(min(len(problems), len(problems) * ended // turns))

    context.sampler.on_ended = None if show is None else show_answered
    share = _sample_own_share(context, setup, plan, problems, seeds)
    context.sampler.on_ended = None
    return _gather_shares(context, share, len(problems), plan.trees_per_prompt)


def _sample_own_share(
    context: RunContext,
    setup: PhaseSetup,
    plan: RolloutPlan,
    problems: Sequence[Problem],
    seeds: Sequence[int],
) -> ScoredTrees:
    """Samples and scores this rank's problems: every `count`-th one, starting at its number."""
    began = time.perf_counter()
    mine = slice(context.ranks.rank, None, context.ranks.count)
    host = build_rollout_host(setup, context.pool, context.policy)
    context.progress.show_activity("generation")
    own, own_seeds, trees = problems[mine], seeds[mine], []
    dialogues, each = context.spec.sampler.dialogues_at_once, plan.continued_per_prompt
    at_once = max(1, dialogues // each) if dialogues is not None and each else None
    with context.cpu.measure("sample"), context.sampler.session() as session:
        for part in _split_evenly(len(own), at_once):
            trees += sample_rollout_trees(
                plan, own[part], own_seeds[part], session, context.policy.dialogue, host
            )
    sampled = time.perf_counter()
    context.progress.show_activity("scoring")
    with context.cpu.measure("score"):
        table = score_rollouts(trees, setup.rewards, context.pool)
    return ScoredTrees(trees, table, sampled - began, time.perf_counter() - sampled)


def _split_evenly(count: int, most: int | None) -> list[slice]:
    """Splits so many items into the fewest parts of at most `most`, of about the same size."""
    parts = 1 if most is None else max(1, -(-count // most))
    starts = [count * part // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def _gather_shares(
    context: RunContext, share: ScoredTrees, problems: int, trees: int
) -> ScoredTrees:
    shares = context.ranks.gather((share.trees, share.table))
    count = context.ranks.count
    merged = [
        shares[i % count][0][i // count * trees + t] for i in range(problems) for t in range(trees)
    ]
    numbers = [
        [i * trees + t for i in range(rank, problems, count) for t in range(trees)]
        for rank in range(count)
    ]
    joined = RewardTable.merge_tables([part for _, part in shares], numbers)
    return ScoredTrees(merged, joined, share.sampled, share.scored)


def build_prompt_fit(policy: Policy, setup: PhaseSetup) -> PromptFit:
    """Which problems of a phase the policy can be shown."""
    rule = setup.spec.rollout.max_prompt_tokens
    return PromptFit(setup.plan, policy.dialogue, policy.context_length, rule)


def draw_held_out_problems(
    fit: PromptFit, task: Task, seed: int, numbers: range, purpose: str
) -> tuple[DrawnProblems, list[int]]:
    """Draws held-out problems that fit the model, by their numbers, with a sampling seed for each
    that depends on `purpose`."""
    data = derive_seed(seed, "held out")
    with show_plugin_output(type(task).__name__):
        drawn = fit.draw_held_out(lambda number: task.problem("test", number, data), numbers)
    return drawn, [derive_seed(seed, purpose, number) for number in drawn.numbers]


def draw_contact_problems(
    policy: Policy, setup: PhaseSetup, count: int
) -> tuple[Sequence[Problem], list[int]]:
    """Draws the first training problems that fit the model, with a sampling seed for each."""
    drawn, seeds = _draw_train_problems(policy, setup, 0, count, "first contact")
    return drawn.problems, seeds


def _draw_train_problems(
    policy: Policy, setup: PhaseSetup, start: int, count: int, purpose: str
) -> tuple[DrawnProblems, list[int]]:
    seed, data = setup.spec.seed, derive_seed(setup.spec.seed, "train")
    with show_plugin_output(setup.spec.task.plugin):
        drawn = build_prompt_fit(policy, setup).draw_train(
            lambda number: setup.task.problem("train", number, data), start, count
        )
    return drawn, [derive_seed(seed, purpose, number) for number in drawn.numbers]


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


def compute_optional_streams(inputs: StepInputs, *, by_sampling: bool) -> dict[str, Tensor]:
    """Computes the streams that the phase needs, by name: those that sample, or all others."""
    streams: dict[str, Tensor] = {}
    for provider in list_providers(inputs.setup.needs):
        if provider.uses_sampler == by_sampling:
            streams |= import_implementation(provider.implementation)(inputs)
    return streams


def compute_old_logprobs(inputs: StepInputs) -> Tensor:
    """`[B, T]` nats under the old policy: as sampled, or as the learner computes them.

    Raises:
        SpecError: tokens are trained on that were not sampled and are not computed either.
    """
    rows, setup = inputs.rows, inputs.setup
    if setup.spec.loss.old_logprobs == "learner":
        return inputs.context.learner.logprobs(rows.batch, rows.mask)
    if (rows.mask & ~rows.batch.is_own).any():
        raise SpecError(
            f"mask strategy {setup.spec.mask.plugin!r} trains on tokens that the policy did not "
            "generate and that have no behaviour log-probabilities: set loss.old_logprobs: "
            "learner"
        )
    return rows.batch.behaviour_logprobs


def compute_reference_logprobs(inputs: StepInputs) -> Mapping[str, Tensor]:
    """`reference_logprobs`: `[B, T]` nats under the reference policy."""
    reference = inputs.context.reference
    assert reference is not None
    return {"reference_logprobs": reference.logprobs(inputs.rows.batch, inputs.rows.mask)}


def compute_collision_probs(inputs: StepInputs) -> Mapping[str, Tensor]:
    """`collision_probs`: `[B, T]` probability that the old policy draws the same token twice."""
    batch, mask = inputs.rows.batch, inputs.rows.mask
    return {"collision_probs": inputs.context.learner.collision_probs(batch, mask)}


def compute_critic_values(inputs: StepInputs) -> Mapping[str, Tensor]:
    """`values`: `[B, T]`, also between trained tokens, where the literal recursion of GAE reads
    them."""
    critic = inputs.context.critic
    assert critic is not None
    return {"values": critic.values(inputs.rows.batch, fill_between_ends(inputs.rows.mask))}


def compute_greedy_scores(inputs: StepInputs) -> Mapping[str, Tensor]:
    """`greedy_scores`: `[B]` score of the greedy answer to each row's prompt."""
    greedy = inputs.rollouts.greedy
    assert greedy is not None
    trees = inputs.rows.batch.tree_ids.tolist()
    return {"greedy_scores": compute_answer_scores(greedy.trees, greedy.table, trees)}


def estimate_state_values(inputs: StepInputs) -> Mapping[str, Tensor]:
    """Estimates Monte-Carlo values of the states at the borders of each row's steps.

    Each rank estimates its share of the rows; all ranks get the result.

    Returns:
        `step_ids`, `[B, T]` step of each own token, -1 elsewhere; and `mc_values`, `[B, S + 1]`
        values at the borders of steps.
    """
    context, setup, batch = inputs.context, inputs.setup, inputs.rows.batch
    trees, cursor = inputs.rollouts.trees, inputs.cursor
    spec = context.spec.monte_carlo
    assert spec is not None  # `rlx.discovery` refuses an estimator that needs it without
    means = build_probe_context(setup, context.policy, context.sampler, context.pool)
    means = replace(means, plan=setup.plan)
    rows = list(enumerate(batch.rows))[context.ranks.rank :: context.ranks.count]
    responses = [
        build_probe_response(
            trees[row.tree], row.segment, means, derive_seed(context.spec.seed, "mc", cursor, b)
        )
        for b, row in rows
    ]
    mine = state_values(responses, means, spec.cut, spec.samples) if responses else []
    shares = context.ranks.gather(mine)
    found = [
        shares[b % context.ranks.count][b // context.ranks.count] for b in range(len(batch.rows))
    ]
    steps = torch.full_like(batch.turn_ids, -1)
    values = torch.zeros(len(found), max(len(one.values) for one in found))
    for b, one in enumerate(found):
        values[b, : len(one.values)] = torch.tensor(one.values)
        (own,) = batch.is_own[b].nonzero(as_tuple=True)
        at = torch.arange(len(own))
        steps[b, own] = torch.bucketize(at, torch.tensor(one.borders[1:-1]), right=True)
    return {"step_ids": steps, "mc_values": values}


def build_probe_context(
    setup: PhaseSetup, policy: Policy, sampler: Sampler, pool: RewardPool
) -> ProbeContext:
    """The context of an experiment's probe, from the setup that training uses."""
    return ProbeContext(
        plan=setup.plan.copy_with_sampling(1),
        sampler=sampler,
        speech=policy.dialogue,
        task=setup.task,
        rewards=setup.rewards,
        correct=setup.spec.evaluation.correct,
        pool=pool,
    )


def _update_models(
    context: RunContext,
    setup: PhaseSetup,
    train: TrainBatch,
    rate: float,
    controllers: ControllerState,
) -> "tuple[list[UpdateStats], CriticStats | None]":
    """Updates the critic, then the policy unless it is still in the critic's lead steps; returns
    statistics of the policy's optimiser steps with a signal, and of the critic's last update."""
    from rlx.learner import critic_rate  # imported here: it takes seconds

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
