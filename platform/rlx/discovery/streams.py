"""Optional inputs (streams) that plugins may need, and whether an experiment provides them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlx.plugin import Estimator, Plugin, Rehearsed
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec, SingleRolloutSpec

__all__ = ["STREAMS", "Stream", "list_needed_streams"]

Provided = Callable[[ExperimentSpec, Plugin], bool]
"""Predicate: whether an experiment with this task provides a stream."""


def _is_never_provided(_: ExperimentSpec, __: Plugin) -> bool:
    return False


def _is_always_provided(_: ExperimentSpec, __: Plugin) -> bool:
    return True


def _has_critic(spec: ExperimentSpec, _: Plugin) -> bool:
    return spec.critic is not None


def _has_monte_carlo(spec: ExperimentSpec, _: Plugin) -> bool:
    return spec.monte_carlo is not None and isinstance(spec.rollout, SingleRolloutSpec)


def _is_single_turn(spec: ExperimentSpec, _: Plugin) -> bool:
    return isinstance(spec.rollout, SingleRolloutSpec)


def _has_demonstrations(_: ExperimentSpec, task: Plugin) -> bool:
    return bool(getattr(task, "demonstrates", True))


def _has_lessons(_: ExperimentSpec, task: Plugin) -> bool:
    return isinstance(task, Rehearsed) and bool(getattr(task, "demonstrates", True))


def _has_environment(spec: ExperimentSpec, _: Plugin) -> bool:
    return isinstance(spec.rollout, EnvironmentRolloutSpec)


@dataclass(frozen=True, slots=True)
class Stream:
    """Data that a run produces only if a plugin needs it.

    Attributes:
        origin: what produces it.
        help: how to make the experiment provide it.
        provided: whether an experiment provides it.
    """

    origin: str
    help: str
    provided: Provided = _is_never_provided


STREAMS: Mapping[str, Stream] = MappingProxyType(
    {
        "values": Stream(
            "a critic", "add one: `critic: {}`, or `critic: {learning_rate: 1e-5}`", _has_critic
        ),
        "reference_logprobs": Stream("a reference model", "", _is_always_provided),
        "token_rewards": Stream("a placement of rewards on tokens", "", _is_always_provided),
        "mc_values": Stream(
            "a Monte-Carlo continuation of responses",
            "add one: `monte_carlo: {samples: 4}`, with `rollout.schedule: single`",
            _has_monte_carlo,
        ),
        "greedy_scores": Stream(
            "a greedy answer next to the sampled ones",
            "use `rollout.schedule: single`",
            _is_single_turn,
        ),
        "environment": Stream(
            "a schedule with an environment",
            "use `rollout.schedule: environment`",
            _has_environment,
        ),
        "demonstrations": Stream(
            "the task",
            "choose a task that has demonstrations, or set model.warm_start: null",
            _has_demonstrations,
        ),
        "lessons": Stream(
            "the task",
            "choose a task that can be rehearsed in the environment (your own task can implement "
            "rlx.plugin.Rehearsed), or set model.warm_start: null",
            _has_lessons,
        ),
    }
)
"""Every stream by its name in `needs`. To add a provider, change the stream's entry."""

ALIASES: Mapping[str, str] = MappingProxyType({"greedy_baseline": "greedy_scores"})
"""Former names of streams, which estimators of others may still ask for."""


def list_needed_streams(plugin: Plugin) -> list[str]:
    """Returns the sorted names of the streams that a plugin reads."""
    by_reading = {"token_rewards"} if getattr(plugin, "reads", "") == "token_rewards" else set()
    named = {ALIASES.get(need, need) for need in plugin.needs}
    return sorted({*named, *(by_reading if isinstance(plugin, Estimator) else ())})
