"""Synthetic rollouts of one phase, run through the experiment's own code."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlx.agents import build_rollout_host
from rlx.credit import CreditInputs, TurnWithoutTokens, structured_scores
from rlx.credit_assignment import build_scored_rows, find_lost_rows
from rlx.phase_setup import PhaseSetup
from rlx.plan.memory import (
    MemoryEstimate,
    ModelShape,
    TokenBudget,
    estimate_step_memory,
    load_model_shape,
    token_budget,
)
from rlx.plan.synthetic_responses import (
    DialogueSession,
    PlanProblems,
    PlanSpeech,
    ResponseAuthor,
    TreeSession,
    find_script,
    fit_to_vocabulary,
)
from rlx.plugin import Problem
from rlx.plugin_calls import blame_plugin
from rlx.reward import RewardPool, RewardTable, score_rollouts
from rlx.rollout import (
    EnvironmentHost,
    RolloutPlan,
    RolloutTree,
    fill_turn_template,
    sample_rollout_trees,
)
from rlx.seeding import derive_seed
from rlx.spec import PhaseSpec
from rlx.step import assign_credit
from rlx.train_batch import ScoredRows, TokenStreams, TrainBatch
from rlx_registry import STREAMS, TokenStream

_ROWS_PER_PROMPT = 512
"""Rows per prompt above which a trial samples smaller groups than the experiment."""
Place = tuple[int, int]
"""(tree, segment)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanTrial:
    """Synthetic rollouts of the phases that have the settings of `setup`.

    Attributes:
        note: what stands in for the task's problems; "" if they are its own.
        shape: None if unknown on this machine.
        table: rewards of the sampled `trees`; `rewards` are the same as tensors.
        train: None, like `rewards`, if nothing could be scored.
        stopped: why credit could not be assigned; "" if it was.
    """

    setup: PhaseSetup
    phases: tuple[PhaseSpec, ...] = ()
    note: str = ""
    shape: ModelShape | None
    trees: list[RolloutTree]
    table: RewardTable
    is_scripted: bool = False
    rewards: CreditInputs | None = None
    train: TrainBatch | None = None
    made_up: tuple[str, ...] = ()
    stopped: str = ""

    @cached_property
    def tokens(self) -> TokenBudget:
        """Tokens of a step."""
        return token_budget(self.setup, self.trees)

    @cached_property
    def memory(self) -> MemoryEstimate | None:
        """What a step needs of a rank; None without a `shape`."""
        shape = self.shape
        return None if shape is None else estimate_step_memory(self.setup, shape, self.tokens)

    @property
    def faults(self) -> dict[Place, str]:
        """Environment faults, by the turn or prompt that caused them."""
        return {
            (t, segment.parent): str(segment.info["fault"])
            for t, tree in enumerate(self.trees)
            for segment in tree.segments
            if segment.author == "environment" and "fault" in segment.info
        }

    @property
    def is_faulty(self) -> bool:
        """A plugin failed, so later results mean little."""
        return bool(self.faults or self.table.faults)

    @property
    def unfinished_turns(self) -> tuple[Place, ...]:
        """Last turns of rollouts that ended before the environment was done."""
        faults, places = self.faults, []
        for t, tree in enumerate(self.trees):
            continued = {segment.parent for segment in tree.segments}
            places += [
                (t, segment.parent)
                for at, segment in enumerate(tree.segments)
                if segment.author == "environment" and at not in continued
            ]
        return tuple(place for place in places if place not in faults)

    @property
    def stuck_plugin(self) -> str:
        """Describes the plugin that missed its deadline; "" if none did."""
        if any(fault.startswith("deadline") for fault in self.faults.values()):
            return "the environment" if self.setup.plan.agent is None else "the agent"
        places = (*self.table.turns.values(), *self.table.rollouts.values())
        entries = (entry for named in places for entry in named.values())
        late = any(e.is_fault and (e.reason or "").startswith("deadline") for e in entries)
        return "a scorer" if late else ""


def run_trial(
    setup: PhaseSetup, problems: PlanProblems, loaded: PlanSpeech, pool: RewardPool
) -> PlanTrial:
    """Samples synthetic rollouts in the shape of the phase and assigns credit to them.

    One rollout runs first, so that a hanging plugin costs one deadline instead of one per sample.

    Raises:
        PluginError, SpecError: the task's script, mask or estimator fails, or a text has no tokens.
        EnvironmentFault: reward workers do not start.
    """
    speech, asked, note = loaded.dialogue, list(problems.problems), problems.note
    if note:  # the task's own prompts must encode unchanged
        asked = [
            replace(p, prompt=fit_to_vocabulary(speech, fill_turn_template(speech, "{prompt}", p)))
            for p in asked
        ]
    whole = setup.plan
    if whole.talk is not None:  # faults are recorded and do not end the plan
        whole = replace(whole, talk=replace(whole.talk, on_error="drop_sample"))
    rewards = [
        replace(one, use=one.use.model_copy(update={"on_error": "drop_sample"}))
        if one.use.on_error == "fail"
        else one
        for one in setup.rewards
    ]
    script = None if whole.talk is None or note else find_script(setup.spec, setup.task)
    shape = load_model_shape(setup.spec.model, loaded.vocabulary)

    def sample_and_score(plan: RolloutPlan, problems: Sequence[Problem]) -> PlanTrial:
        seeds = [derive_seed(setup.spec.seed, "plan", i) for i in range(len(problems))]
        room = (shape and shape.positions) or sys.maxsize
        author = ResponseAuthor(plan, setup.spec, setup.task, speech)
        host = build_rollout_host(setup, pool, loaded)
        session: TreeSession | DialogueSession
        if plan.talk is None:
            session = TreeSession(author, problems, room)
        elif isinstance(host, EnvironmentHost):
            session = host = DialogueSession(author, problems, seeds, plan.talk, room, host, script)
        else:
            session = DialogueSession(author, problems, seeds, plan.talk, room)
        trees = sample_rollout_trees(plan, problems, seeds, session, speech, host)
        return PlanTrial(
            setup=setup,
            note=note,
            shape=shape,
            trees=trees,
            table=score_rollouts(trees, rewards, pool),
            is_scripted=script is not None,
        )

    first = sample_and_score(whole.copy_with_siblings(1), asked[:1])
    if first.stuck_plugin:
        return replace(first, stopped=f"{first.stuck_plugin} hangs on the first rollout")
    most = max(level.count for level in whole.levels)
    while whole.rows_per_prompt > _ROWS_PER_PROMPT and most > 2:
        most //= 2
        whole = whole.copy_with_siblings(most)
    return _assign_trial_credit(sample_and_score(whole, asked))


def _assign_trial_credit(trial: PlanTrial) -> PlanTrial:
    spec = trial.setup.spec
    setup, what = trial.setup, "synthetic rollouts"
    setup = replace(
        setup,
        mask=blame_plugin("mask", spec.mask.plugin, what)(setup.mask),
        estimator=blame_plugin("estimator", spec.estimator.plugin, what)(setup.estimator),
    )
    lost = find_lost_rows(trial.trees, trial.table, needs_reward=spec.learns_from_rewards)
    rows = build_scored_rows(setup, trial.trees, trial.table, without=lost)
    if rows is None:
        return replace(trial, stopped="no rollout could be scored")
    streams, made_up = _sample_streams(setup, rows)
    try:
        train = assign_credit(rows, streams, setup.rules)
    except TurnWithoutTokens as error:
        return replace(trial, rewards=rows.rewards, stopped=str(error))
    return replace(trial, rewards=rows.rewards, train=train, made_up=made_up)


def _sample_streams(setup: PhaseSetup, rows: ScoredRows) -> tuple[TokenStreams, tuple[str, ...]]:
    draw = torch.Generator().manual_seed(derive_seed(setup.spec.seed, "plan", "streams"))
    providers = {STREAMS[need].provider for need in setup.needs if need in STREAMS}
    optional = {
        stream.name: _sample_stream(stream, rows, draw)
        for stream in STREAMS.values()
        if stream.is_optional and stream.provider in providers
    }
    behaviour, beta = rows.batch.behaviour_logprobs, setup.spec.credit.kl_coef
    titles = (STREAMS[name].title or name.replace("_", " ") for name in optional)
    made_up = ("responses", "behaviour log-probabilities", *titles)
    return TokenStreams(old_logprobs=behaviour, optional=optional, beta=beta), made_up


def _sample_stream(stream: TokenStream, rows: ScoredRows, draw: torch.Generator) -> Tensor:
    """Synthetic values of one stream; every row is one reasoning step."""
    behaviour, rewards = rows.batch.behaviour_logprobs, rows.rewards
    if stream.dtype == "int64":
        return torch.where(rows.batch.is_own, 0, -1)
    if stream.shape == "[B]":
        parts = (rewards.turn_rewards, rewards.turn_present, rewards.global_rewards)
        return structured_scores(*parts).mean().expand(len(behaviour))
    if stream.shape == "[B, S + 1]":  # nothing is left to gain in the last state
        return pad(0.5 + 0.1 * torch.randn(len(behaviour), 1, generator=draw), (0, 1))
    around = behaviour if stream.unit == "nats" else 0.5
    return around + 0.1 * torch.randn(behaviour.shape, generator=draw)
