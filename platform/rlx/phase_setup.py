"""Build the setup of a phase (plugins, rollout plan and functions) from its spec."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from rlx.batch import TokenBatch
from rlx.credit import Credit, CreditInputs
from rlx.discovery import bind_implementation, build_placement, list_needed_streams, resolve_plugins
from rlx.errors import PluginError
from rlx.plugin import (
    FAILED,
    Environment,
    Placement,
    RewardPlugin,
    Task,
    get_confidence_values,
)
from rlx.reward import NamedReward, RewardPool, host_environment
from rlx.rollout import EnvironmentHost, RolloutPlan, ToolHost, build_rollout_plan
from rlx.spec import (
    PROFILES,
    CreditSpec,
    EnvironmentRolloutSpec,
    ExperimentSpec,
    GlobalReward,
    LossSpec,
    TurnReward,
)

Estimate = Callable[[CreditInputs], Tensor | Credit]


@dataclass(frozen=True, eq=False, kw_only=True)
class CreditRules:
    """How a phase turns rewards into advantages and loss weights.

    Attributes:
        estimator: advantage estimator with its options bound.
        credit: how rewards are placed, and KL in the reward.
        loss: aggregation, correction, and the entropy bonus.
        max_tokens: token budget of each kind of turn; the divisor of `aggregate: constant` if
            `constant_length` is not set.
        confidences: the texts that a stated confidence can be; read with `loss.expected` only.
    """

    estimator: Estimate
    credit: CreditSpec
    loss: LossSpec
    max_tokens: Mapping[str, int]
    confidences: tuple[str, ...] = ()

    @property
    def counts_empty_rows(self) -> bool:
        """Whether rows without a learning token count in averages over rows."""
        return bool(PROFILES[self.credit.profile].get("count_empty_rows"))

    @cached_property
    def placement(self) -> Placement:
        """Which tokens receive the rewards."""
        return build_placement(self.credit)


@dataclass(frozen=True, slots=True)
class PhaseSetup:
    """Plugins and functions of one phase of an experiment.

    Attributes:
        spec: resolved for this phase.
        demonstrations: source of the warm start's demonstrations.
        environment: None if nothing responds between turns.
        variants: the task with other options, for additional held-out sets, by name.
        compares: whether the estimator gives a row that is alone in its group no advantage, by the
            kind of its last turn.
        ranks_rows: whether the estimator compares a row with the others of its group, if any.
        needs: streams, and other things, that the estimator or the loss reads.
    """

    spec: ExperimentSpec
    plan: RolloutPlan
    task: Task
    demonstrations: Task
    environment: Environment | None
    variants: Mapping[str, Task]
    rewards: tuple[NamedReward, ...]
    mask: Callable[[TokenBatch], Tensor]
    estimator: Estimate
    compares: Callable[[str], bool]
    ranks_rows: bool
    needs: frozenset[str]

    @property
    def label(self) -> str:
        """The reward that tells right from wrong: `loss.expected.of`, or `evaluation.correct`."""
        expected = self.spec.loss.expected
        return self.spec.evaluation.correct if expected is None else expected.of

    @property
    def rules(self) -> CreditRules:
        """How the phase turns rewards into advantages and loss weights."""
        return CreditRules(
            estimator=self.estimator,
            credit=self.spec.credit,
            loss=self.spec.loss,
            max_tokens=self.max_tokens,
            confidences=get_confidence_values(self.task),
        )

    @property
    def max_tokens(self) -> dict[str, int]:
        """Token budget of the policy in a row, by the kind of the row's last turn."""
        budgets = self.spec.rollout.budgets
        return {kind: budgets[requested] for kind, requested in self.requested_kinds.items()}

    @property
    def temperatures(self) -> dict[str, float]:
        """Sampling temperature of each kind of turn."""
        turns = self.spec.rollout.turn_specs
        return {
            kind: turns[requested].temperature for kind, requested in self.requested_kinds.items()
        }

    @property
    def requested_kinds(self) -> dict[str, str]:
        """Requested kind of turn, by the kind that the environment may assign to it."""
        turns = self.spec.rollout.turns
        if self.plan.agent is None and self.environment is None:
            return {turn: turn for turn in turns}
        (requested,) = turns
        kinds = turns if self.environment is None else self.environment.kinds
        return dict.fromkeys((*kinds, FAILED), requested)


def build_setup(spec: ExperimentSpec) -> PhaseSetup:
    """Imports the plugins that `spec` names and applies their options.

    Raises:
        PluginError: a plugin cannot be used, or lacks the methods of its kind.
    """
    plugins = resolve_plugins(spec)
    if not isinstance(plugins.task, Task):
        raise PluginError(f"task plugin {spec.task.plugin!r} has no `problem` and `demonstration`")
    if not isinstance(plugins.demonstrations, Task):
        raise PluginError("model.warm_start.demonstrations has no `problem` and `demonstration`")
    uses: list[tuple[Literal["turn", "global"], str, TurnReward | GlobalReward]] = [
        *(("turn", name, use) for name, use in spec.rewards.turn.items()),
        *(("global", name, use) for name, use in spec.rewards.global_.items()),
    ]
    rewards = []
    for scope, name, use in uses:
        plugin = plugins.rewards[scope, name]
        if not isinstance(plugin, RewardPlugin):
            raise PluginError(
                f"reward {name!r}: {type(plugin).__name__} has no `scope` and `score`"
            )
        rewards.append(NamedReward(name, use, plugin, scope))
    estimator, needs = plugins.estimator, set(list_needed_streams(plugins.estimator))
    if spec.credit.use_kl_in_reward or spec.loss.kl is not None:
        needs.add("reference_logprobs")
    is_among_siblings = getattr(estimator, "baseline", "siblings") == "siblings"
    replayable = plugins.environment is None or plugins.environment.replayable
    return PhaseSetup(
        spec=spec,
        plan=build_rollout_plan(spec.rollout, replayable=replayable),
        task=plugins.task,
        demonstrations=plugins.demonstrations,
        environment=plugins.environment,
        variants=plugins.variants,
        rewards=tuple(rewards),
        mask=bind_implementation(plugins.mask),
        estimator=bind_implementation(estimator),
        compares=estimator.compares,
        ranks_rows="singleton" in type(estimator).model_fields and is_among_siblings,
        needs=frozenset(needs),
    )


def build_environment_host(setup: PhaseSetup, pool: RewardPool) -> EnvironmentHost | None:
    """The host that runs the environment in workers; None without an environment."""
    rollout, environment = setup.spec.rollout, setup.environment
    if environment is None or not isinstance(rollout, EnvironmentRolloutSpec):
        return None
    limits = rollout.resolve_limits(replayable=environment.replayable)
    host = host_environment(environment, pool, limits, rollout.environment.plugin)
    return ToolHost(host) if rollout.tools else host
