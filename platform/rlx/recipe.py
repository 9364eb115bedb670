"""The recipe of a run: plugins, plan and functions, built from its experiment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from rlx.batch import TokenBatch
from rlx.credit import Credit, CreditInputs
from rlx.discovery import import_implementation, resolve_plugins
from rlx.errors import PluginError
from rlx.plugin import Environment, Estimator, Mask, Plugin, RewardPlugin, Task
from rlx.reward import NamedReward, PooledHost, RewardPool
from rlx.rollout import FAILED, RolloutPlan, build_rollout_plan
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec

__all__ = ["Recipe", "build_environment_host", "build_recipe"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one phase of an experiment works with.

    Attributes:
        spec: the experiment as it stands in this phase.
        plan: the levels that are sampled.
        task: where problems come from.
        environment: what answers between turns; None where nothing does.
        variants: the task with other options, for more held-out sets, by their names.
        rewards: those of turns and of whole rollouts.
        mask: which tokens learn.
        estimator: how rewards become advantages.
        needs: streams that the estimator reads.
    """

    spec: ExperimentSpec
    plan: RolloutPlan
    task: Task
    environment: Environment | None
    variants: Mapping[str, Task]
    rewards: tuple[NamedReward, ...]
    mask: Callable[[TokenBatch], Tensor]
    estimator: Callable[[CreditInputs], Tensor | Credit]
    needs: frozenset[str]

    @property
    def wants_values(self) -> bool:
        """Whether a critic is asked."""
        return "values" in self.needs

    @property
    def wants_mc(self) -> bool:
        """Whether states of responses are valued by sampling on from them."""
        return "mc_values" in self.needs

    @property
    def wants_greedy(self) -> bool:
        """Whether a greedy answer is sampled for each prompt."""
        return "greedy_baseline" in self.needs

    @property
    def wants_reference(self) -> bool:
        """Whether KL from the reference policy is used."""
        spec = self.spec
        asked = spec.credit.use_kl_in_reward or spec.loss.kl is not None
        return asked or "reference_logprobs" in self.needs

    @property
    def max_tokens(self) -> dict[str, int]:
        """Tokens that the policy may write in a row, by the kind of turn that the row ends with."""
        budgets = self.spec.rollout.budgets
        return {kind: budgets[asked] for kind, asked in self._requested_kinds.items()}

    @property
    def temperatures(self) -> dict[str, float]:
        """The sampler's temperature for each kind of turn."""
        turns = self.spec.rollout.turn_specs
        return {kind: turns[asked].temperature for kind, asked in self._requested_kinds.items()}

    @property
    def _requested_kinds(self) -> dict[str, str]:
        """For every kind that a turn may turn out to be, the one that was asked for."""
        if self.environment is None:
            return {turn: turn for turn in self.spec.rollout.turns}
        (asked,) = self.spec.rollout.turns
        return dict.fromkeys((*self.environment.kinds, FAILED), asked)


def build_recipe(spec: ExperimentSpec) -> Recipe:
    """Imports the plugins that `spec` names and sets them to its options."""
    plugins = resolve_plugins(spec)
    if not isinstance(plugins.task, Task):
        raise PluginError(f"task plugin {spec.task.plugin!r} has no `problem` and `demonstration`")
    return Recipe(
        spec=spec,
        plan=build_rollout_plan(spec.rollout),
        task=plugins.task,
        environment=plugins.environment,
        variants=plugins.variants,
        rewards=(
            *(
                NamedReward(
                    name, use, _require_reward_plugin(name, plugins.rewards["turn", name]), "turn"
                )
                for name, use in spec.rewards.turn.items()
            ),
            *(
                NamedReward(
                    name,
                    use,
                    _require_reward_plugin(name, plugins.rewards["global", name]),
                    "global",
                )
                for name, use in spec.rewards.global_.items()
            ),
        ),
        mask=_bind_options(plugins.mask),
        estimator=_bind_options(plugins.estimator),
        needs=plugins.estimator.needs,
    )


def build_environment_host(recipe: Recipe, pool: RewardPool) -> PooledHost | None:
    """Where the environment runs; None where there is none."""
    rollout, environment = recipe.spec.rollout, recipe.environment
    if environment is None or not isinstance(rollout, EnvironmentRolloutSpec):
        return None
    return PooledHost(environment, pool, rollout.environment.deadline)


def _require_reward_plugin(name: str, plugin: Plugin) -> RewardPlugin:
    if not isinstance(plugin, RewardPlugin):
        raise PluginError(f"reward {name!r}: {type(plugin).__name__} has no `scope` and `score`")
    return plugin


def _bind_options(descriptor: Mask | Estimator) -> Callable[[Any], Any]:
    """The descriptor's implementation with its options as keywords."""
    options = {name: getattr(descriptor, name) for name in type(descriptor).model_fields}
    return partial(import_implementation(type(descriptor).implementation), **options)
