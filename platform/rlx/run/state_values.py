"""Monte-Carlo values of a step's responses, as tensors in row order."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlx.batch import TokenBatch
from rlx.probe import ProbeContext, StateValues, build_probe_response, state_values
from rlx.run.streams import StepInputs
from rlx.seeding import derive_seed

__all__ = ["estimate_state_values"]


def estimate_state_values(inputs: StepInputs) -> Mapping[str, Tensor]:
    """Estimates Monte-Carlo values of the states at the borders of each row's steps.

    Each rank estimates its share of the rows; all ranks get the result.

    Returns:
        `step_ids`, `[B, T]` step of each own token, -1 elsewhere; and `mc_values`, `[B, S + 1]`
        values at the borders of steps.

    Raises:
        ValueError: the experiment has no `monte_carlo` section.
    """
    context, setup, batch = inputs.context, inputs.setup, inputs.rows.batch
    trees, cursor = inputs.rollouts.trees, inputs.cursor
    spec = context.spec.monte_carlo
    if spec is None:
        raise ValueError("the experiment has no `monte_carlo` section")
    means = ProbeContext(
        plan=setup.plan,
        sampler=context.sampler,
        speech=context.policy.dialogue,
        task=setup.task,
        rewards=setup.rewards,
        correct=context.spec.evaluation.correct,
        pool=context.pool,
    )
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
    steps, values = _build_state_tensors(batch, found)
    return {"step_ids": steps, "mc_values": values}


def _build_state_tensors(batch: TokenBatch, found: Sequence[StateValues]) -> tuple[Tensor, Tensor]:
    steps = torch.full_like(batch.turn_ids, -1)
    width = max(len(one.values) for one in found)
    values = torch.zeros(len(found), width)
    for b, one in enumerate(found):
        values[b, : len(one.values)] = torch.tensor(one.values)
        (own,) = batch.is_own[b].nonzero(as_tuple=True)
        at = torch.arange(len(own))
        steps[b, own] = torch.bucketize(at, torch.tensor(one.borders[1:-1]), right=True)
    return steps, values
