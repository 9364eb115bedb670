"""A few made-up rollouts of one phase, carried through the experiment's own code."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlx.batch import build_token_batch, list_batch_rows
from rlx.credit import TurnWithoutTokens, structured_scores
from rlx.errors import PluginError
from rlx.plan.model_shape import ModelShape, load_model_shape
from rlx.plan.rehearsal import Rehearsal, ScriptedPolicy
from rlx.plan.responses import FakeSession, ResponseAuthor
from rlx.plan.stand_ins import EncodingDialogue, PlanProblems, fit_to_vocabulary
from rlx.plugin import Problem, Rehearsed
from rlx.recipe import Recipe, build_environment_host
from rlx.reward import NamedReward, RewardPool, RewardTable, score_rollouts
from rlx.rollout import RolloutPlan, RolloutTree, sample_rollout_trees
from rlx.row_rewards import build_row_rewards
from rlx.seeding import derive_seed
from rlx.step import RowRewards, TokenStreams, TrainBatch, assign_credit

__all__ = ["Place", "PlanTrial", "run_trial"]

Place = tuple[int, int]
"""(tree, segment)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanTrial:
    """What came of made-up rollouts.

    Attributes:
        recipe: of the phase.
        shape: of the model; None where it is not known here.
        trees: as they were grown.
        table: their rewards.
        is_scripted: the turns are those of the task's own script.
        rewards: the same as tensors; None, as `train` is, where nothing could be scored.
        train: with advantages and weights.
        made_up: names of the streams that no model gave.
        stopped: why credit could not be given; "" where it was.
    """

    recipe: Recipe
    shape: ModelShape | None
    trees: list[RolloutTree]
    table: RewardTable
    is_scripted: bool = False
    rewards: RowRewards | None = None
    train: TrainBatch | None = None
    made_up: tuple[str, ...] = ()
    stopped: str = ""

    @property
    def faults(self) -> dict[Place, str]:
        """What the environment did wrong, by what it was given: a turn, or a prompt to begin."""
        return {
            (t, segment.parent): str(segment.info["fault"])
            for t, tree in enumerate(self.trees)
            for segment in tree.segments
            if segment.author == "environment" and "fault" in segment.info
        }

    @property
    def is_faulty(self) -> bool:
        """A plugin failed, so that what is left says little."""
        return bool(self.faults or self.table.faults)

    @property
    def unfinished_turns(self) -> tuple[Place, ...]:
        """Last turns of rollouts that the environment would have had go on."""
        places = []
        for t, tree in enumerate(self.trees):
            continued = {segment.parent for segment in tree.segments}
            places += [
                (t, segment.parent)
                for at, segment in enumerate(tree.segments)
                if segment.author == "environment" and at not in continued
            ]
        return tuple(place for place in places if place not in self.faults)

    @property
    def stuck_plugin(self) -> str:
        """The plugin that missed its deadline, in words; "" where none did."""
        every = (
            e
            for places in (self.table.turns, self.table.rollouts)
            for entries in places.values()
            for e in entries.values()
            if e.is_fault
        )
        if any(map(_is_late, self.faults.values())):
            return "the environment"
        return "a scorer" if any(_is_late(e.reason or "") for e in every) else ""


def _is_late(fault: str) -> bool:
    return fault.startswith("deadline")


def run_trial(
    recipe: Recipe, problems: PlanProblems, speech: EncodingDialogue, pool: RewardPool
) -> PlanTrial:
    """Grows rollouts of the phase's true shape and gives them credit.

    One rollout goes first, so that what hangs costs one deadline and not one per sample.

    Raises:
        PluginError: the task's script, the mask or the estimator fails.
        SpecError: the tokenizer cannot write a template, or what the environment says.
        EnvironmentFault: reward workers do not start.
    """
    asked = list(problems.problems)
    if problems.note:  # the task's own are either written as they are, or an error
        asked = [replace(p, prompt=fit_to_vocabulary(speech, p.prompt)) for p in asked]
    whole = recipe.plan
    if whole.talk is not None:  # its faults are found and end nothing
        whole = replace(whole, talk=replace(whole.talk, on_error="drop_sample"))
    one = whole.copy_with_sampling(1)
    one = replace(one, levels=tuple(replace(level, count=1) for level in one.levels))
    script = None
    if whole.talk is not None and isinstance(recipe.task, Rehearsed) and not problems.note:
        script = ScriptedPolicy.from_experiment(recipe.spec, recipe.task)
    stage = _TrialRunner(recipe, load_model_shape(recipe.spec.model), speech, script, pool)
    first = stage.build_trial(one, asked[:1])
    if first.stuck_plugin:
        return replace(first, stopped=f"{first.stuck_plugin} hangs on the first rollout")
    return _assign_trial_credit(stage.build_trial(whole, asked))


def _relax_error_policy(reward: NamedReward) -> NamedReward:
    """The same reward, whose faults are found and end nothing."""
    if reward.use.on_error != "fail":
        return reward
    return replace(reward, use=reward.use.model_copy(update={"on_error": "drop_sample"}))


@dataclass(frozen=True, eq=False, slots=True)
class _TrialRunner:
    """Where made-up rollouts are grown and scored.

    Attributes:
        script: speaks in an environment; None where the task has none for its problems.
    """

    recipe: Recipe
    shape: ModelShape | None
    speech: EncodingDialogue
    script: ScriptedPolicy | None
    pool: RewardPool

    def build_trial(self, plan: RolloutPlan, problems: Sequence[Problem]) -> PlanTrial:
        """Rollouts of a plan, with their rewards."""
        recipe, speech = self.recipe, self.speech
        seeds = [derive_seed(recipe.spec.seed, "plan", i) for i in range(len(problems))]
        room = (self.shape and self.shape.positions) or sys.maxsize
        author = ResponseAuthor(plan, recipe.task, speech)
        host = build_environment_host(recipe, self.pool)
        if host is None or plan.talk is None:
            trees = sample_rollout_trees(
                plan, problems, seeds, FakeSession(author, problems, room), speech
            )
        else:
            there = Rehearsal(author, self.script, problems, plan.talk, host, room)
            trees = sample_rollout_trees(plan, problems, seeds, there, speech, there)
        return PlanTrial(
            recipe=recipe,
            shape=self.shape,
            trees=trees,
            table=score_rollouts(
                trees, [_relax_error_policy(reward) for reward in recipe.rewards], self.pool
            ),
            is_scripted=plan.talk is not None and self.script is not None,
        )


def _assign_trial_credit(trial: PlanTrial) -> PlanTrial:
    recipe, table = trial.recipe, trial.table
    rows = list_batch_rows(trial.trees)
    out = {
        (row.tree, row.segment)
        for row in rows
        if (row.tree, row.segment) in table.dropped
        or table.total_score(row.tree, row.turns) is None
    }
    if len(out) == len(rows):
        return replace(trial, stopped="no rollout could be scored")
    batch = build_token_batch(trial.trees, temperatures=recipe.temperatures, without=out)
    rewards = build_row_rewards(batch, trial.trees, table)
    mask = _wrap_plugin("mask", recipe.spec.mask.plugin, recipe.mask)(batch)
    streams, made_up = _sample_streams(recipe, batch.behaviour_logprobs, rewards)
    try:
        train = assign_credit(
            batch,
            rewards,
            mask,
            streams,
            estimator=_wrap_plugin("estimator", recipe.spec.estimator.plugin, recipe.estimator),
            credit=recipe.spec.credit,
            loss=recipe.spec.loss,
            max_tokens=recipe.max_tokens,
        )
    except TurnWithoutTokens as error:
        return replace(trial, rewards=rewards, stopped=str(error))
    return replace(trial, rewards=rewards, train=train, made_up=made_up)


def _wrap_plugin(kind: str, name: str, plugin: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same plugin, whose failure is told as its own."""

    def call_plugin(given: Any) -> Any:
        try:
            return plugin(given)
        except Exception as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PluginError(
                f"{kind} plugin {name!r} failed on made-up rollouts: {type(error).__name__}: {why}"
            ) from error

    return call_plugin


def _sample_streams(
    recipe: Recipe, behaviour: Tensor, rewards: RowRewards
) -> tuple[TokenStreams, tuple[str, ...]]:
    """What models would say: made up, and only what the experiment asks for."""
    draw = torch.Generator().manual_seed(derive_seed(recipe.spec.seed, "plan", "streams"))
    rows, shape = len(behaviour), behaviour.shape
    made_up = ["responses", "behaviour log-probabilities"]
    reference = values = greedy = None
    if recipe.wants_reference:
        made_up.append("reference log-probabilities")
        reference = behaviour + 0.1 * torch.randn(shape, generator=draw)
    if recipe.wants_values:
        made_up.append("values of the critic")
        values = 0.5 + 0.1 * torch.randn(shape, generator=draw)
    if recipe.wants_greedy:
        made_up.append("scores of greedy answers")
        scores = structured_scores(
            rewards.turn_rewards, rewards.turn_present, rewards.global_rewards
        )
        greedy = scores.mean().expand(rows)
    streams = TokenStreams(
        old_logprobs=behaviour,
        reference_logprobs=reference,
        values=values,
        greedy_scores=greedy,
        beta=recipe.spec.credit.kl_coef,
    )
    return streams, tuple(made_up)
