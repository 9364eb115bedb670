"""Builds all plugins that an experiment names."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from rlx.discovery.default_options import list_default_options
from rlx.discovery.places import (
    DEMONSTRATIONS,
    PluginReference,
    Provenance,
    build_all_plugins,
    build_provenance,
    list_built_plugins,
    plugin_places,
)
from rlx.plugin import Environment, Estimator, Mask, Plugin
from rlx.spec import ExperimentSpec, KeyPath
from rlx.spec.reading import Diagnostic, build_refusal

__all__ = ["BuiltPlugins", "ExperimentPlugins", "build_named_plugins", "resolve_plugins"]


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
        """Returns what a run records of its plugins: provenance, and digests of data."""
        return [
            {**asdict(origin), "data": dict(plugin.data())}
            for origin, plugin in zip(self.provenance, self.named, strict=True)
        ]


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
