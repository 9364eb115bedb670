"""Token streams of a training step, each computed only if the estimator or the loss reads it.

`rlx_registry.STREAMS` lists them, and `rlx.discovery` names the function of each provider.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.credit import fill_between_ends
from rlx.credit_assignment import compute_answer_scores
from rlx.discovery import import_implementation, list_providers
from rlx.errors import RegistryError, SpecError
from rlx.phase_setup import PhaseSetup
from rlx.probe import build_probe_response, state_values
from rlx.record import TrainedRows
from rlx.run.collect import StepRollouts
from rlx.run.context import RunContext
from rlx.run.probes import build_probe_context
from rlx.seeding import derive_seed
from rlx.train_batch import ScoredRows, TokenStreams, TrainBatch
from rlx_registry import STREAMS


def spread_step_values(step_ids: Tensor, values: Tensor) -> Tensor:
    """`[B, T]` value of the state in which each token's step begins; 0 without a step."""
    known = step_ids >= 0
    return torch.where(known, values.gather(1, step_ids.clamp(min=0)), 0.0)


def collect_state_values(step_ids: Tensor, per_token: Tensor) -> Tensor:
    """Recovers the `[B, S + 1]` values from the result of `spread_step_values`: every step has
    tokens, and the value of the last state is 0."""
    steps = int(step_ids.max()) + 1
    nowhere = torch.where(step_ids < 0, steps + 1, step_ids)
    values = per_token.new_zeros(len(step_ids), steps + 2)
    return values.scatter(1, nowhere, per_token)[:, : steps + 1]


def build_trained_rows(train: TrainBatch) -> TrainedRows:
    batch, streams, scores = train.batch, train.streams, train.scores
    row_scores = dict(vars(scores))
    per_token: dict[str, Tensor | None] = {}
    for stream in STREAMS.values():
        values = train.find_stream(stream.name)
        if values is not None and stream.shape == "[B]":
            row_scores[stream.stored_name] = values
        elif values is not None and stream.shape == "[B, S + 1]":
            per_token[stream.stored_name] = spread_step_values(streams.optional["step_ids"], values)
        elif stream.shape != "[B]":
            per_token[stream.stored_name] = values
    return TrainedRows(
        [(r.tree, r.segment, r.parent, r.kind, r.level) for r in batch.rows],
        batch.group_ids,
        batch.is_own,
        per_token,
        row_scores,
    )


def read_token_streams(
    rows: TrainedRows,
    batch: TokenBatch,
    kept: Tensor,
    statistics: Mapping[str, Any],
    recomputed: Mapping[str, Tensor],
) -> TokenStreams:
    """The token streams of recorded rows.

    Args:
        batch: some of the recorded rows, `[B, T]`.
        kept: `[B]` index of each row of `batch` in the record.
        statistics: β and the estimator's state of the step.
        recomputed: streams that replace recorded ones, by name.

    Raises:
        RegistryError: the step was recorded without the log-probabilities of the old policy.
    """
    width = batch.is_own.shape[1]
    old = rows.tokens["old_logprobs"]
    if old is None:
        raise RegistryError("the step was recorded without old_logprobs")
    found: dict[str, Tensor] = {}
    for stream in (one for one in STREAMS.values() if one.is_optional):
        columns = rows.scores if stream.shape == "[B]" else rows.tokens
        values = columns.get(stream.stored_name)
        if values is None:
            continue
        found[stream.name] = values[kept] if stream.shape == "[B]" else values[kept][:, :width]
        if stream.dtype == "int64":
            found[stream.name] = torch.where(batch.is_own, found[stream.name], -1)
        if stream.shape == "[B, S + 1]":
            found[stream.name] = collect_state_values(found["step_ids"], found[stream.name])
    return TokenStreams(
        old_logprobs=old[kept][:, :width],
        optional={**found, **recomputed},
        beta=statistics["beta"],
        state=statistics["state_before"],
    )


@dataclass(frozen=True, eq=False, slots=True)
class StepInputs:
    """What the provider of a stream reads; `cursor` is the number of problems drawn before."""

    context: RunContext
    setup: PhaseSetup
    rows: ScoredRows
    rollouts: StepRollouts
    cursor: int


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
