"""Builds all plugins that an experiment names."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from rlx.discovery.lookup import (
    InstalledPlugin,
    Kind,
    PluginFault,
    build_plugin_diagnostic,
    compute_plugin_digest,
    find_installed_plugin,
    load_plugin,
)
from rlx.errors import PluginError
from rlx.plugin import Environment, Estimator, Mask, Placement, Plugin, Rehearsed
from rlx.plugin_calls import show_plugin_output
from rlx.spec import (
    PLUGIN_SECTIONS,
    PLUGIN_USES,
    PROFILES,
    TOOLS,
    CreditSpec,
    EnvironmentUse,
    EstimatorUse,
    ExperimentSpec,
    GlobalReward,
    KeyPath,
    MaskUse,
    ModelFiles,
    MultiTurnRolloutSpec,
    PlacementUse,
    PluginUse,
    SingleRolloutSpec,
    TurnReward,
    get_at_path,
    list_yaml_keys,
)
from rlx.spec.reading import Diagnostic, build_refusal, explain_validation_error
from rlx_registry import STREAMS

DEMONSTRATIONS: KeyPath = ("model", "warm_start", "demonstrations")
"""Where an experiment names the task of its warm start."""


@dataclass(frozen=True, slots=True)
class Provenance(InstalledPlugin):
    """Which code a plugin's name resolved to, by the digest of its source, and all its options."""

    sha256: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PluginReference:
    """One place in a spec that names a plugin: the keys that rlx reads itself, the one that holds
    the plugin's name ("" if the name stands there alone), the plugin's options, and the credit
    profile that fills in those that an estimator or a mask lacks."""

    path: KeyPath
    kind: Kind
    keys: tuple[str, ...]
    key: str
    name: str
    options: Mapping[str, Any]
    of: Any
    profile: str = "rlx"

    @property
    def name_path(self) -> KeyPath:
        """Path of the plugin's name."""
        return (*self.path, self.key) if self.key else self.path

    @property
    def label(self) -> str:
        return f"{self.kind} plugin '{self.name}'"


def build_plugin(use: PluginUse, kind: Kind) -> Plugin:
    """Imports a plugin and builds it with its options; raises what `load_plugin` does, and
    `InvalidSpec` where the options are invalid."""
    tree = use.model_dump(mode="json", by_alias=True)
    built = _build_plugin_at(_build_plugin_place((), kind, type(use), tree))
    if isinstance(built, Plugin):
        return built
    raise build_refusal(built, f"{kind} plugin '{use.plugin}'")


def build_placement(credit: CreditSpec) -> Placement:
    """Builds the placement in effect, as `build_plugin` does."""
    return cast(Placement, build_plugin(credit.resolved_placement, "placement"))


def bind_implementation(plugin: Estimator | Mask | Placement) -> Callable[[Any], Any]:
    """The function that an estimator, mask or placement names, with its options bound: a parameter
    `options` gets the plugin itself, a function without one each option by name."""
    function = import_implementation(type(plugin).implementation)
    options = {name: getattr(plugin, name) for name in type(plugin).model_fields}
    if "options" in signature(function).parameters and "options" not in options:
        return partial(function, options=plugin)
    return partial(function, **options)


def import_implementation(name: str) -> Callable[..., Any]:
    """Imports the function that a plugin names, "module:function"; raises `PluginError` if that is
    impossible."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(f"implementation {name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise PluginError(f"implementation {name!r} is not a function")
    return function  # type: ignore[no-any-return]


def _build_plugin_place(
    path: KeyPath, kind: Kind, model: type[PluginUse], tree: Mapping[str, Any]
) -> PluginReference:
    keys, field = list_yaml_keys(model), model.model_fields["plugin"]
    key = field.alias or "plugin"
    options = {k: v for k, v in tree.items() if k not in keys}
    return PluginReference(
        path, kind, keys, key, tree.get(key, field.default), options, tree.get("of")
    )


def _list_places(tree: Mapping[str, Any]) -> Iterator[PluginReference]:
    """Yields the places of a tree that name plugins; malformed ones are skipped, since the spec
    reader reports them."""
    task, rollout = tree.get("task"), _get_mapping(tree, "rollout")
    named: list[tuple[KeyPath, type[PluginUse], Any]] = [(("task",), PluginUse, task)]
    for name, changed in _get_mapping(tree, "evaluation", "variants").items():
        if isinstance(task, dict) and isinstance(changed, dict):
            named.append((("evaluation", "variants", name), PluginUse, {**task, **changed}))
    named.append((DEMONSTRATIONS, PluginUse, get_at_path(tree, DEMONSTRATIONS)))
    if rollout.get("schedule") == "environment":
        use = rollout.get("environment")
        if tools := rollout.get("tools"):
            use = {"plugin": TOOLS, **(use if isinstance(use, dict) else {}), "tools": tools}
        named.append((("rollout", "environment"), EnvironmentUse, use))
    scopes: dict[str, type[PluginUse]] = {"turn": TurnReward, "global": GlobalReward}
    for scope, model in scopes.items():
        uses = _get_mapping(tree, "rewards", scope).items()
        named += [(("rewards", scope, name), model, use) for name, use in uses]
    at: KeyPath = ("credit", "placement")
    named.append((("mask",), MaskUse, tree.get("mask")))
    named.append((("estimator",), EstimatorUse, tree.get("estimator")))
    named.append((at, PlacementUse, get_at_path(tree, at)))
    for path, model, use in named:
        kind = cast(Kind, PLUGIN_USES[model])
        if isinstance(use, str) and model is PlacementUse:
            yield PluginReference(path, kind, list_yaml_keys(model), "", use, {}, None)
        elif isinstance(use, dict):
            place = _build_plugin_place(path, kind, model, use)
            if kind in ("estimator", "mask"):
                profile = str(get_at_path(tree, ("credit", "profile")))
                place = replace(place, profile=profile)
            if isinstance(place.name, str):
                yield place
    yield from _list_foreign_sections(tree)


def _get_mapping(tree: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """Returns the mapping at a path; an empty one if there is none."""
    found = get_at_path(tree, path)
    return found if isinstance(found, dict) else {}


def _list_foreign_sections(tree: Mapping[str, Any]) -> Iterator[PluginReference]:
    """Yields the sections whose models other distributions provide. rlx's own are part of its
    version, which a run records. The spec reader reports malformed ones."""
    for path, section in PLUGIN_SECTIONS.items():
        value = tree.get(path[0])
        model = section.get_model(value)
        if value is None or model is None or model in section.shipped.values():
            continue
        try:
            section.validate_section(value, as_json=True)
        except ValueError:
            continue
        kind = cast(Kind, section.kind)
        yield PluginReference(path, kind, (), section.key, value[section.key], value, None)


def fill_profile_options(
    model: type[BaseModel], options: Mapping[str, Any], profile: str
) -> dict[str, Any]:
    """Returns a plugin's options, with those that are omitted filled in from a profile."""
    filled = dict(options)
    conventions = PROFILES.get(cast(Any, profile), {})
    for name, field in model.model_fields.items() if conventions else ():
        inner, own = field.annotation, filled.get(name, {})
        if name in conventions:
            filled.setdefault(name, conventions[name])
        elif isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(own, Mapping):
            filled[name] = fill_profile_options(inner, own, profile)
    return filled


def _build_plugin_at(place: PluginReference) -> Plugin | list[Diagnostic]:
    """Builds a plugin with its options, or returns diagnostics with the paths of its options."""
    cls = load_plugin(place.kind, place.name)
    inner, faults = _build_plugins(_list_nested_places(cls, place))
    options = fill_profile_options(cls, place.options, place.profile)
    try:
        with show_plugin_output(place.name):
            plugin = cls.model_validate_json(to_json(options), strict=True)
    except ValidationError as error:
        keys = [k for k in place.keys if k != "plugin"]
        options = dict(place.options)
        own = explain_validation_error(error, cls, options, at=place.path, more_keys=keys)
        return [*own, *faults]
    except Exception as error:
        what = f"failed on its options: {type(error).__name__}: {error}"
        raise PluginFault(
            build_plugin_diagnostic(find_installed_plugin(place.kind, place.name), what)
        ) from error
    if faults or not cls.nested:
        return faults or plugin
    held: dict[str, dict[str, Plugin]] = {option: {} for option in cls.nested}
    for path, made in inner.items():
        held[str(path[-2])][str(path[-1])] = made
    return plugin.with_inner(held)


def _list_nested_places(cls: type[Plugin], place: PluginReference) -> Iterator[PluginReference]:
    """Yields the plugins that a plugin's options name; malformed ones are skipped, since validation
    of the options reports them."""
    for option, kind in cls.nested.items():
        named = place.options.get(option)
        for key, inner in (named if isinstance(named, dict) else {}).items():
            if isinstance(inner, dict) and isinstance(inner.get("plugin"), str):
                path = (*place.path, option, key)
                yield _build_plugin_place(path, cast(Kind, kind), PluginUse, inner)


def _build_plugins(
    places: Iterable[PluginReference],
) -> tuple[dict[KeyPath, Plugin], list[Diagnostic]]:
    """Builds the plugin at each place; returns plugins by path, and diagnostics of those that
    failed."""
    built: dict[KeyPath, Plugin] = {}
    faults: list[Diagnostic] = []
    for place in places:
        try:
            made = _build_plugin_at(place)
        except PluginFault as error:
            faults.append(replace(error.diagnostic, path=place.name_path))
            continue
        if isinstance(made, Plugin):
            built[place.path] = made
        else:
            faults += made
    return built, faults


def _list_with_nested(
    places: Iterable[PluginReference], built: Mapping[KeyPath, Plugin]
) -> Iterator[tuple[PluginReference, Plugin]]:
    for place in places:
        if plugin := built.get(place.path):
            yield place, plugin
            inner = list(_list_nested_places(type(plugin), place))
            held = {i.path: plugin.inner(str(i.path[-2]))[str(i.path[-1])] for i in inner}
            yield from _list_with_nested(inner, held)


def _list_default_options(place: PluginReference, plugin: Plugin) -> Iterator[KeyPath]:
    """Yields the paths of options without which a plugin would be the same, those in a mapping
    before the mapping. Plugins that are nested in it are not looked at."""
    cls, options = type(plugin), dict(place.options)
    whole = plugin.model_dump(mode="json", by_alias=True)
    for at in list(_list_option_paths(options, ())):
        if at[0] in cls.nested:
            continue
        fewer = deepcopy(options)
        del get_at_path(fewer, at[:-1])[at[-1]]
        filled = fill_profile_options(cls, fewer, place.profile)
        made = None
        with suppress(Exception):  # third-party code may raise anything where an option is missing
            made = cls.model_validate_json(to_json(filled), strict=True)
        if made is not None and made.model_dump(mode="json", by_alias=True) == whole:
            options = fewer
            yield (*place.path, *at)


def _list_option_paths(options: Mapping[str, Any], above: KeyPath) -> Iterator[KeyPath]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _list_option_paths(value, (*above, name))
        yield (*above, name)


@dataclass(frozen=True, slots=True)
class ExperimentPlugins:
    """The plugins of one experiment, built with their options.

    Attributes:
        variants: the task with the options of each of `evaluation.variants`.
        demonstrations: the task that `model.warm_start` names, else the experiment's own.
        rewards: by scope, "turn" or "global", and name.
        provenance: one entry per plugin, in the order of the spec.
        named: the plugins, in the same order.
        default_options: paths of options in the spec that have their default values.
        reference: `model.reference`, whose files decide the result as data do.
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
    reference: ModelFiles | None = None
    warnings: tuple[Diagnostic, ...] = ()

    def compute_digest(self, spec: ExperimentSpec) -> str:
        """Returns the experiment's digest, with options that have their defaults left out."""
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
        if self.reference is not None:
            digest = import_implementation("rlx.model:compute_reference_digest")(self.reference)
            no_code = dict.fromkeys(("distribution", "version", "entry_point", "sha256"), "")
            data = {"contents": digest} if digest else {}
            name = self.reference.path
            records.append({"kind": "model", "name": name, **no_code, "options": {}, "data": data})
        return records


@dataclass(frozen=True, slots=True)
class BuiltPlugins:
    """Where a tree names plugins, those that could be built by path, and why others could not;
    those nested in other plugins are in these."""

    places: tuple[PluginReference, ...]
    built: Mapping[KeyPath, Plugin]
    faults: tuple[Diagnostic, ...]

    def list_all(self) -> list[tuple[PluginReference, Plugin]]:
        """Returns every built plugin, each followed by its nested plugins."""
        return list(_list_with_nested(self.places, self.built))

    def to_experiment(self, spec: ExperimentSpec) -> ExperimentPlugins:
        """Returns the plugins of an experiment, all of which could be built."""
        built, named = self.built, self.list_all()
        rewards = {(str(p[1]), str(p[2])): made for p, made in built.items() if p[0] == "rewards"}
        provenance = []
        for place, plugin in named:
            found = find_installed_plugin(place.kind, place.name)
            digest = compute_plugin_digest(found)
            options = plugin.model_dump(mode="json", by_alias=True)
            provenance.append(Provenance(**asdict(found), sha256=digest, options=options))
        # Of variants of the task, and of whole sections, the spec holds the defaults.
        own = [
            p for p in self.places if p.path[0] != "evaluation" and p.path not in PLUGIN_SECTIONS
        ]
        defaults = [at for place in own for at in _list_default_options(place, built[place.path])]
        return ExperimentPlugins(
            task=built["task",],
            variants={str(p[-1]): made for p, made in built.items() if p[0] == "evaluation"},
            demonstrations=built.get(DEMONSTRATIONS, built["task",]),
            environment=cast(Environment | None, built.get(("rollout", "environment"))),
            rewards=rewards,
            mask=cast(Mask, built["mask",]),
            estimator=cast(Estimator, built["estimator",]),
            provenance=tuple(provenance),
            named=tuple(plugin for _, plugin in named),
            default_options=tuple(defaults),
            reference=spec.model.reference,
        )


def build_named_plugins(tree: Mapping[str, Any]) -> BuiltPlugins:
    """Imports the plugins that an experiment's values name, and builds them with their options."""
    places = tuple(_list_places(tree))
    built, faults = _build_plugins(places)
    return BuiltPlugins(places, built, tuple(faults))


def resolve_plugins(spec: ExperimentSpec) -> ExperimentPlugins:
    """Builds an experiment's plugins, without those of its phases and without checking their fit;
    raises `InvalidSpec` with every fault."""
    plugins = build_named_plugins(spec.dump_resolved())
    if plugins.faults:
        raise build_refusal(plugins.faults, f"experiment '{spec.name}'")
    return plugins.to_experiment(spec)


@dataclass(frozen=True, slots=True)
class Provider:
    """What computes streams, or has something else that a plugin may need.

    Attributes:
        origin: in words.
        is_present: whether an experiment with this task has it.
        help: how to make the experiment provide it.
        implementation: "module:function" that computes its streams in a training step, called with
            `rlx.run.StepInputs`; "" if it provides no streams.
        uses_sampler: whether it samples, which it must do before the next step's rollouts begin.
        section: the section that exists only for its streams.
        user: an estimator that needs its streams, named as an example.
    """

    origin: str
    is_present: Callable[[ExperimentSpec, Plugin], bool] = lambda spec, task: True
    help: str = ""
    implementation: str = ""
    uses_sampler: bool = False
    section: str = ""
    user: str = ""


def _demonstrates(task: Plugin) -> bool:
    return bool(getattr(task, "demonstrates", True))


PROVIDERS: Mapping[str, Provider] = {
    "reference": Provider(
        "a reference model", implementation="rlx.run.training:compute_reference_logprobs"
    ),
    "distributions": Provider(
        "the learner's distributions",
        implementation="rlx.run.training:compute_collision_probs",
    ),
    "critic": Provider(
        "a critic",
        lambda spec, task: spec.critic is not None,
        "add one: `critic: {}`, or `critic: {learning_rate: 1e-5}`",
        implementation="rlx.run.training:compute_critic_values",
        section="critic",
        user="gae",
    ),
    "monte_carlo": Provider(
        "a Monte-Carlo continuation of responses",
        lambda spec, task: (
            spec.monte_carlo is not None and isinstance(spec.rollout, SingleRolloutSpec)
        ),
        "add one: `monte_carlo: {samples: 4}`, with `rollout.schedule: single`",
        implementation="rlx.run.training:estimate_state_values",
        uses_sampler=True,
        section="monte_carlo",
        user="vineppo",
    ),
    "greedy_answer": Provider(
        "a greedy answer next to the sampled ones",
        lambda spec, task: isinstance(spec.rollout, SingleRolloutSpec),
        "use `rollout.schedule: single`",
        implementation="rlx.run.training:compute_greedy_scores",
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
"""Every provider: of streams, by its name in their table (`rlx_registry.STREAMS`), and of other
things that a plugin may need."""


_EVERY_STEP = Provider("every step")
NEEDS: Mapping[str, Provider] = {
    stream.name: PROVIDERS.get(stream.provider, _EVERY_STEP)
    for stream in STREAMS.values()
    if stream.provider != "credit"
} | {name: one for name, one in PROVIDERS.items() if not one.implementation}
"""The provider of everything that `needs` may name."""


def list_needed_streams(plugin: Plugin) -> list[str]:
    """Returns the sorted names of the streams that a plugin reads."""
    of_tokens = isinstance(plugin, Estimator) and plugin.reads == "token_rewards"
    return sorted({*plugin.needs, *(("token_rewards",) if of_tokens else ())})


def list_providers(needs: Iterable[str]) -> list[Provider]:
    """Returns those who compute the streams among `needs`, in the order of their table."""
    names = {STREAMS[need].provider for need in needs if need in STREAMS}
    return [one for name, one in PROVIDERS.items() if name in names]


def list_plugin_records(spec: ExperimentSpec, plugins: ExperimentPlugins) -> list[dict[str, Any]]:
    """Returns what a run records of its plugins, and of those with data that only phases have."""
    records = plugins.list_records()
    for phase in spec.phases:
        if phase.set:
            added = resolve_plugins(spec.resolve_phase_spec(phase)).list_records()
            records += [one for one in added if one["data"] and one not in records]
    return records


def _pair_records(
    now: Iterable[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], list[str]]]:
    """Yields plugins, each with that of the recorded ones of its name which is most like it, and
    the options in which they differ. Of a plugin of a phase alone, nothing may be recorded."""
    for record in now:
        pairs = []
        for other in then:
            if (other["kind"], other["name"]) == (record["kind"], record["name"]):
                own, options = record["options"], other.get("options") or {}
                pairs.append((other, [o for o in own if o in options and own[o] != options[o]]))
        if pairs:
            yield record, *min(pairs, key=lambda pair: len(pair[1]))


def describe_plugin_changes(
    now: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yields a note for each plugin whose version, source, default options or data differ from
    those that a run recorded."""
    for record, before, changed in _pair_records(now, then):
        label = f"{record['kind']} plugin {record['name']!r}"
        here, there = (f"{one['distribution']} {one['version']}" for one in (record, before))
        if here != there:
            yield f"{label} is from {here} here; the run used {there}"
        elif record["sha256"] != before["sha256"]:
            yield f"{label} has changed since the run, in the same version, {here}"
        for option in changed:
            was, is_now = before["options"][option], record["options"][option]
            yield f"{label} had {option}: {was!r} when the run began, and has {is_now!r} now"
    yield from describe_data_changes(now, then)


def describe_data_changes(
    now: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yields a note for each file that a plugin of a run reads, and that has changed since.

    What the run or this machine has no digest of is not compared, nor what has other options.
    """
    for record, before, changed in _pair_records(now, then):
        here, was = record["data"], before.get("data") or {}
        for name in {**was, **here} if here and was and not changed else ():
            if was.get(name) != here.get(name):
                plugin = "" if record["kind"] == "model" else " plugin"
                yield (
                    f"{record['kind']}{plugin} {record['name']!r}: {name} was "
                    f"{was.get(name, 'not read')} when the run began, and is "
                    f"{here.get(name, 'not read')} now"
                )
