"""A few made-up rollouts of one phase, carried through the experiment's own code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlx.batch import flatten
from rlx.credit import structured_scores
from rlx.credit.place import TurnWithoutTokens
from rlx.errors import PluginError
from rlx.plan.fake import Author, FakeSession
from rlx.plan.stand_ins import Problems, Speech, writable
from rlx.plugin import Problem
from rlx.reward import NamedReward, RewardPool, RewardTable, score
from rlx.rollout import RolloutPlan, RolloutTree, grow
from rlx.run.parts import Parts
from rlx.run.rows import row_rewards
from rlx.seeding import derive_seed
from rlx.step import RowRewards, Streams, TrainBatch, assign_credit

__all__ = ["Trial", "carry", "hangs"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Trial:
    """What came of made-up rollouts.

    Attributes:
        parts: of the phase.
        trees: as they were grown.
        table: their rewards.
        rewards: the same as tensors; None, as `train` is, where nothing could be scored.
        train: with advantages and weights.
        made_up: names of the streams that no model gave.
        stopped: why credit could not be given; "" where it was.
    """

    parts: Parts
    trees: list[RolloutTree]
    table: RewardTable
    rewards: RowRewards | None = None
    train: TrainBatch | None = None
    made_up: tuple[str, ...] = ()
    stopped: str = ""


def carry(parts: Parts, problems: Problems, speech: Speech, pool: RewardPool) -> Trial:
    """Grows rollouts of the phase's true shape and gives them credit.

    One rollout goes first, so that a scorer that hangs costs one deadline and not one per sample.

    Raises:
        PluginError: the mask or the estimator fails.
        SpecError: the tokenizer cannot write a template.
        EnvironmentFault: reward workers do not start.
    """
    rewards = [_lenient(reward) for reward in parts.rewards]
    asked = list(problems.problems)
    if problems.note:  # the task's own are either written as they are, or an error
        asked = [replace(p, prompt=writable(speech, p.prompt)) for p in asked]
    small = RolloutPlan(tuple(replace(v, count=1) for v in parts.plan.levels), parts.plan.system)
    first = _scored(parts, small, asked[:1], speech, rewards, pool)
    if hangs(first.table):
        return replace(first, stopped="a scorer hangs on the first rollout")
    return _credited(_scored(parts, parts.plan, asked, speech, rewards, pool))


def hangs(table: RewardTable) -> bool:
    """Whether a scorer missed its deadline."""
    every = (
        e for places in (table.turns, table.rollouts) for es in places.values() for e in es.values()
    )
    return any(e.is_fault and (e.reason or "").startswith("deadline") for e in every)


def _lenient(reward: NamedReward) -> NamedReward:
    """The same reward, whose faults are found and end nothing."""
    if reward.use.on_error != "fail":
        return reward
    return replace(reward, use=reward.use.model_copy(update={"on_error": "drop_sample"}))


def _scored(
    parts: Parts,
    plan: RolloutPlan,
    problems: Sequence[Problem],
    speech: Speech,
    rewards: Sequence[NamedReward],
    pool: RewardPool,
) -> Trial:
    seeds = [derive_seed(parts.spec.seed, "plan", i) for i in range(len(problems))]
    session = FakeSession(Author(plan, parts.task, speech), problems)
    trees = grow(plan, problems, seeds, session, speech)
    return Trial(parts=parts, trees=trees, table=score(trees, rewards, pool))


def _credited(trial: Trial) -> Trial:
    parts, table = trial.parts, trial.table
    out = {p for p in table.turns if table.total(p) is None and table.overall(p) is None}
    out |= table.dropped
    if len(out) == len(table.turns):
        return replace(trial, stopped="no rollout could be scored")
    batch = flatten(trial.trees, temperatures=parts.temperatures, without=out)
    rewards = row_rewards(batch, trial.trees, table)
    mask = _asking("mask", parts.spec.mask.plugin, parts.mask)(batch)
    streams, made_up = _streams(parts, batch.behaviour_logprobs, rewards)
    try:
        train = assign_credit(
            batch,
            rewards,
            mask,
            streams,
            estimator=_asking("estimator", parts.spec.estimator.plugin, parts.estimator),
            credit=parts.spec.credit,
            loss=parts.spec.loss,
            max_tokens=parts.max_tokens,
        )
    except TurnWithoutTokens as error:
        return replace(trial, rewards=rewards, stopped=str(error))
    return replace(trial, rewards=rewards, train=train, made_up=made_up)


def _asking(kind: str, name: str, plugin: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same plugin, whose failure is told as its own."""

    def ask(given: Any) -> Any:
        try:
            return plugin(given)
        except Exception as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PluginError(
                f"{kind} plugin {name!r} failed on made-up rollouts: {type(error).__name__}: {why}"
            ) from error

    return ask


def _streams(
    parts: Parts, behaviour: Tensor, rewards: RowRewards
) -> tuple[Streams, tuple[str, ...]]:
    """What models would say: made up, and only what the experiment asks for."""
    draw = torch.Generator().manual_seed(derive_seed(parts.spec.seed, "plan", "streams"))
    rows, shape = len(behaviour), behaviour.shape
    made_up = ["responses", "behaviour log-probabilities"]
    reference = values = greedy = None
    if parts.wants_reference:
        made_up.append("reference log-probabilities")
        reference = behaviour + 0.1 * torch.randn(shape, generator=draw)
    if parts.wants_values:
        made_up.append("values of the critic")
        values = 0.5 + 0.1 * torch.randn(shape, generator=draw)
    if parts.wants_greedy:
        made_up.append("scores of greedy answers")
        scores = structured_scores(
            rewards.turn_rewards, rewards.turn_present, rewards.global_rewards
        )
        greedy = scores.mean().expand(rows)
    streams = Streams(
        old_logprobs=behaviour,
        reference_logprobs=reference,
        values=values,
        greedy_scores=greedy,
        beta=parts.spec.credit.kl_coef,
    )
    return streams, tuple(made_up)
