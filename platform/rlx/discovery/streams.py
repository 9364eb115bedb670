"""What plugins may need, and what an experiment must have to provide it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlx.plugin import Estimator, Plugin, Rehearsed
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec, SingleRolloutSpec
from rlx_registry import STREAMS

__all__ = ["NEEDS", "PROVIDERS", "Provider", "list_needed_streams", "list_providers"]


@dataclass(frozen=True, slots=True)
class Provider:
    """What computes streams, or has something else that a plugin may need.

    Attributes:
        origin: what provides it.
        is_present: whether an experiment with this task has it.
        help: how to make the experiment provide it.
        implementation: "module:function" that computes its streams in a training step, called with
            `rlx.run.StepInputs`; "" if it provides no streams.
        uses_sampler: whether it samples, which it must do before the next step's rollouts begin.
        section: the section that exists only for its streams.
        user: an estimator that needs its streams, named as an example.
    """

    origin: str
    is_present: Callable[[ExperimentSpec, Plugin], bool]
    help: str = ""
    implementation: str = ""
    uses_sampler: bool = False
    section: str = ""
    user: str = ""


def _demonstrates(task: Plugin) -> bool:
    return bool(getattr(task, "demonstrates", True))


def _is_single_turn(spec: ExperimentSpec) -> bool:
    return isinstance(spec.rollout, SingleRolloutSpec)


PROVIDERS: Mapping[str, Provider] = MappingProxyType(
    {
        "reference": Provider(
            "a reference model",
            lambda spec, task: True,
            implementation="rlx.run.streams:compute_reference_logprobs",
        ),
        "distributions": Provider(
            "the learner's distributions",
            lambda spec, task: True,
            implementation="rlx.run.streams:compute_collision_probs",
        ),
        "critic": Provider(
            "a critic",
            lambda spec, task: spec.critic is not None,
            "add one: `critic: {}`, or `critic: {learning_rate: 1e-5}`",
            implementation="rlx.run.streams:compute_critic_values",
            section="critic",
            user="gae",
        ),
        "monte_carlo": Provider(
            "a Monte-Carlo continuation of responses",
            lambda spec, task: spec.monte_carlo is not None and _is_single_turn(spec),
            "add one: `monte_carlo: {samples: 4}`, with `rollout.schedule: single`",
            implementation="rlx.run.state_values:estimate_state_values",
            uses_sampler=True,
            section="monte_carlo",
            user="vineppo",
        ),
        "greedy_answer": Provider(
            "a greedy answer next to the sampled ones",
            lambda spec, task: _is_single_turn(spec),
            "use `rollout.schedule: single`",
            implementation="rlx.run.streams:compute_greedy_scores",
        ),
        "environment": Provider(
            "a schedule with an environment",
            lambda spec, task: isinstance(spec.rollout, EnvironmentRolloutSpec),
            "use `rollout.schedule: environment`",
        ),
        "demonstrations": Provider(
            "the task",
            lambda spec, task: _demonstrates(task),
            "choose a task that has demonstrations, name one in model.warm_start.demonstrations, "
            "or set model.warm_start: null",
        ),
        "lessons": Provider(
            "the task",
            lambda spec, task: isinstance(task, Rehearsed) and _demonstrates(task),
            "choose a task that can be rehearsed in the environment (your own task can implement "
            "rlx.plugin.Rehearsed), or set model.warm_start: null",
        ),
    }
)
"""Every provider: of streams, by its name in their table (`rlx_registry.STREAMS`), and of other
things that a plugin may need."""

_EVERY_STEP = Provider("every step", lambda spec, task: True)

NEEDS: Mapping[str, Provider] = MappingProxyType(
    {
        stream.name: PROVIDERS.get(stream.provider, _EVERY_STEP)
        for stream in STREAMS.values()
        if stream.provider != "credit"
    }
    | {name: one for name, one in PROVIDERS.items() if not one.implementation}
)
"""The provider of everything that `needs` may name."""

ALIASES: Mapping[str, str] = MappingProxyType({"greedy_baseline": "greedy_scores"})
"""Former names of streams, which estimators of others may still ask for."""


def list_needed_streams(plugin: Plugin) -> list[str]:
    """Returns the sorted names of the streams that a plugin reads."""
    by_reading = {"token_rewards"} if getattr(plugin, "reads", "") == "token_rewards" else set()
    named = {ALIASES.get(need, need) for need in plugin.needs}
    return sorted({*named, *(by_reading if isinstance(plugin, Estimator) else ())})


def list_providers(needs: Iterable[str]) -> list[Provider]:
    """Returns those who compute the streams among `needs`, in the order of their table."""
    names = {STREAMS[need].provider for need in needs if need in STREAMS}
    return [one for name, one in PROVIDERS.items() if name in names]
