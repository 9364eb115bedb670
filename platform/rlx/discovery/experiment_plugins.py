"""Builds all plugins that an experiment names."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, cast

from rlx.discovery.places import (
    DEMONSTRATIONS,
    PluginReference,
    Provenance,
    build_all_plugins,
    build_provenance,
    list_built_plugins,
    list_default_options,
    plugin_places,
)
from rlx.plugin import Environment, Estimator, Mask, Plugin, Rehearsed
from rlx.plugin_calls import show_plugin_output
from rlx.spec import ExperimentSpec, KeyPath, MultiTurnRolloutSpec, SingleRolloutSpec
from rlx.spec.reading import Diagnostic, build_refusal
from rlx_registry import STREAMS


@dataclass(frozen=True, slots=True)
class ExperimentPlugins:
    """The plugins of one experiment, built with their options.

    Attributes:
        variants: the task with the options of each of `evaluation.variants`.
        demonstrations: the task that `model.warm_start` names, else the experiment's own.
        environment: None if the schedule has none.
        rewards: by (scope, name), such as `("turn", "accuracy")`; the scope is "turn" or "global".
        provenance: one entry per plugin, in the order of the spec.
        named: the plugins, in the same order as `provenance`.
        default_options: paths of options in the spec that have their default values.
        warnings: what `rlx.plan` warns of; empty if the experiment was not checked.
    """

    task: Plugin
    variants: Mapping[str, Any]
    demonstrations: Plugin
    environment: Environment | None
    rewards: Mapping[tuple[str, str], Plugin]
    mask: Mask
    estimator: Estimator
    provenance: tuple[Provenance, ...]
    named: tuple[Plugin, ...]
    default_options: tuple[KeyPath, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()

    def compute_digest(self, spec: ExperimentSpec) -> str:
        """Returns the digest that identifies an experiment with these plugins, except the seed.

        An option that is written with its default value counts as omitted.
        """
        return spec.compute_digest(self.default_options)

    def list_records(self) -> list[dict[str, Any]]:
        """Returns what a run records of its plugins: provenance, and digests of data.

        Data that this machine lacks have none: `Plugin.check` reports them.
        """
        records = []
        for origin, plugin in zip(self.provenance, self.named, strict=True):
            data: dict[str, str] = {}
            with show_plugin_output(origin.name), suppress(OSError, ImportError, ValueError):
                data = dict(plugin.data())
            records.append({**asdict(origin), "data": data})
        return records


@dataclass(frozen=True, slots=True)
class BuiltPlugins:
    """What became of the plugins that a tree names.

    Attributes:
        places: where the tree names plugins, without those nested in other plugins.
        built: the plugins that could be built, by path.
        faults: why the others could not.
    """

    places: tuple[PluginReference, ...]
    built: Mapping[KeyPath, Plugin]
    faults: tuple[Diagnostic, ...]

    def list_all(self) -> list[tuple[PluginReference, Plugin]]:
        """Returns every built plugin, each followed by its nested plugins."""
        return list(list_built_plugins(self.places, self.built))

    def get_reward(self, name: str) -> Plugin | None:
        """Returns the turn or global reward of that name."""
        either = (self.built.get(("rewards", scope, name)) for scope in ("turn", "global"))
        return next(filter(None, either), None)

    def to_experiment(self) -> ExperimentPlugins:
        """Returns the plugins of an experiment, all of which could be built."""
        built, named = self.built, self.list_all()
        rewards = {(str(p[1]), str(p[2])): made for p, made in built.items() if p[0] == "rewards"}
        return ExperimentPlugins(
            task=built["task",],
            variants={str(p[-1]): made for p, made in built.items() if p[0] == "evaluation"},
            demonstrations=built.get(DEMONSTRATIONS, built["task",]),
            environment=cast(Environment | None, built.get(("rollout", "environment"))),
            rewards=rewards,
            mask=cast(Mask, built["mask",]),
            estimator=cast(Estimator, built["estimator",]),
            provenance=tuple(build_provenance(place, plugin) for place, plugin in named),
            named=tuple(plugin for _, plugin in named),
            default_options=tuple(list_default_options(self.places, built)),
        )


def build_named_plugins(tree: Mapping[str, Any]) -> BuiltPlugins:
    """Imports the plugins that an experiment's values name, and builds them with their options."""
    places = tuple(plugin_places(tree))
    built, faults = build_all_plugins(places)
    return BuiltPlugins(places, built, tuple(faults))


def resolve_plugins(spec: ExperimentSpec) -> ExperimentPlugins:
    """Builds an experiment's plugins, without those of its phases and without checking their fit.

    Raises:
        InvalidSpec: lists every fault found; InvalidPlugins if only plugins are at fault.
    """
    plugins = build_named_plugins(spec.dump_resolved())
    if plugins.faults:
        raise build_refusal(plugins.faults, f"experiment '{spec.name}'")
    return plugins.to_experiment()


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
            implementation="rlx.run.streams:estimate_state_values",
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
            "a schedule with an environment or an agent",
            lambda spec, task: isinstance(spec.rollout, MultiTurnRolloutSpec),
            "use `rollout.schedule: environment` or `agent`",
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


def describe_plugin_changes(
    now: Sequence[Provenance], then: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yields a note for each plugin whose version, source or default options differ from the run's.

    Args:
        now: the plugins of the run's experiment here.
        then: those that the run recorded.
    """
    used: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in then:
        used.setdefault((record["kind"], record["name"]), []).append(record)
    for plugin in now:
        before = used.get((plugin.kind, plugin.name))
        if before is None:  # used by a phase only; the record covers the base experiment
            continue
        label = f"{plugin.kind} plugin {plugin.name!r}"
        here = f"{plugin.distribution} {plugin.version}"
        there = f"{before[-1]['distribution']} {before[-1]['version']}"
        if here != there:
            yield f"{label} is from {here} here; the run used {there}"
        elif plugin.sha256 != before[-1]["sha256"]:
            yield f"{label} has changed since the run, in the same version, {here}"
        for option, was, is_now in _list_option_changes(plugin, before):
            yield f"{label} had {option}: {was!r} when the run began, and has {is_now!r} now"


def describe_data_changes(
    now: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yields a note for each file that a plugin of a run reads, and that has changed since.

    What the run or this machine has no digest of is not compared.

    Args:
        now: the plugins of the run's experiment here, as `ExperimentPlugins.list_records`.
        then: those that the run recorded.
    """
    for record in now:
        here = record["data"]
        before = [
            other["data"]
            for other in then
            if (other["kind"], other["name"]) == (record["kind"], record["name"])
            and other.get("data")
        ]
        if not here or not before or here in before:
            continue
        was = before[-1]
        for name in {**was, **here}:
            if was.get(name) != here.get(name):
                yield (
                    f"{record['kind']} plugin {record['name']!r}: {name} was "
                    f"{was.get(name, 'not read')} when the run began, and is "
                    f"{here.get(name, 'not read')} now"
                )


def _list_option_changes(
    plugin: Provenance, before: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Any, Any]]:
    """Options that the run's plugin of that name had with another value; none if one of several
    plugins of that name had them all as they are now."""
    changes = [
        [
            (option, was, plugin.options[option])
            for option, was in (record.get("options") or {}).items()
            if option in plugin.options and plugin.options[option] != was
        ]
        for record in before
    ]
    return min(changes, key=len)
