"""Plugins with their options, and whether an experiment's plugins fit each other."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import to_json

from rlx.discovery.advice import advice
from rlx.discovery.fit import (
    beyond_own,
    misfits,
    unasked,
    under_profile,
    ungraded,
    unheard,
    unspoilable,
)
from rlx.discovery.lookup import Kind, PluginFault, fault, find, fingerprint, load
from rlx.discovery.streams import STREAMS, needed
from rlx.plugin import Environment, Estimator, Mask, Plugin
from rlx.spec import (
    EnvironmentUse,
    EstimatorUse,
    ExperimentSpec,
    GlobalReward,
    ManyTurn,
    MaskUse,
    PhaseSpec,
    PluginUse,
    TurnReward,
)
from rlx.spec.base import keys_of
from rlx.spec.diagnostic import (
    Diagnostic,
    InvalidSpec,
    KeyPath,
    did_you_mean,
    dotted,
    refusal,
)
from rlx.spec.place import in_phase, locate
from rlx.spec.reader import ReadSpec, read_document, validate

__all__ = ["Plugins", "Provenance", "check", "check_file", "make", "resolve"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which code a plugin's name stood for.

    Attributes:
        sha256: hex digest of the module's source; of all of a package's `.py` files when the entry
            point names a package.
        options: all of its options as they were, defaults and profile included.
    """

    kind: Kind
    name: str
    distribution: str
    version: str
    entry_point: str
    sha256: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plugins of one experiment, with their options.

    Attributes:
        variants: the task with the options of each of `evaluation.variants`.
        environment: None where the schedule has none.
        rewards: by (scope, name), such as `("turn", "accuracy")`; the scope is "turn" or "global".
        provenance: one entry per plugin named, in the order of the spec.
        named: those plugins, in the same order.
        warnings: what the author should know, none of which stops a run.
    """

    task: Plugin
    variants: Mapping[str, Any]
    environment: Environment | None
    rewards: Mapping[tuple[str, str], Plugin]
    mask: Mask
    estimator: Estimator
    provenance: tuple[Provenance, ...]
    named: tuple[Plugin, ...]
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class _Use:
    """One place of a spec that names a plugin.

    Attributes:
        keys: those that are not the plugin's own.
        profile: whose conventions an estimator follows where its options do not say.
    """

    path: KeyPath
    kind: Kind
    keys: tuple[str, ...]
    key: str
    name: str
    options: Mapping[str, Any]
    of: Any
    profile: str = "rlx"

    @property
    def label(self) -> str:
        return f"{self.kind} plugin '{self.name}'"


def make(use: PluginUse, kind: Kind) -> Plugin:
    """Imports a plugin and gives it its options.

    Raises:
        PluginFault: as `load`.
        InvalidSpec: the options do not fit.
    """
    tree = use.model_dump(mode="json", by_alias=True)
    made = _made(_use((), kind, type(use), tree))
    if isinstance(made, Plugin):
        return made
    raise refusal(made, f"{kind} plugin '{use.plugin}'")


def _use(path: KeyPath, kind: Kind, model: type[PluginUse], tree: Mapping[str, Any]) -> _Use:
    keys = keys_of(model)
    key = model.model_fields["plugin"].alias or "plugin"
    options = {k: v for k, v in tree.items() if k not in keys}
    return _Use(path, kind, keys, key, _name(model, tree), options, tree.get("of"))


def _name(model: type[PluginUse], tree: Mapping[str, Any]) -> Any:
    """The plugin that a mapping names, or the one that it leaves to a default."""
    field = model.model_fields["plugin"]
    return tree.get(field.alias or "plugin", field.default)


def _uses(tree: Mapping[str, Any]) -> Iterator[_Use]:
    """The places of a tree that name plugins; those that are malformed are left to the reader."""
    rewards = tree.get("rewards")
    rewards = rewards if isinstance(rewards, dict) else {}
    places: list[tuple[KeyPath, Kind, type[PluginUse], Any]] = [
        (("task",), "task", PluginUse, tree.get("task"))
    ]
    places += ((path, "task", PluginUse, use) for path, use in _variants(tree))
    rollout = tree.get("rollout")
    if isinstance(rollout, dict) and rollout.get("schedule") == "environment":
        use = rollout.get("environment")
        places.append((("rollout", "environment"), "environment", EnvironmentUse, use))
    scopes: tuple[tuple[str, type[PluginUse]], ...] = (
        ("turn", TurnReward),
        ("global", GlobalReward),
    )
    for scope, model in scopes:
        named = rewards.get(scope)
        for name, use in (named if isinstance(named, dict) else {}).items():
            places.append((("rewards", scope, name), "reward", model, use))
    places.append((("mask",), "mask", MaskUse, tree.get("mask")))
    places.append((("estimator",), "estimator", EstimatorUse, tree.get("estimator")))
    credit = tree.get("credit")
    profile = credit.get("profile") if isinstance(credit, dict) else None
    for path, kind, model, use in places:
        if isinstance(use, dict) and isinstance(_name(model, use), str):
            made = _use(path, kind, model, use)
            yield replace(made, profile=str(profile)) if kind == "estimator" else made


def _variants(tree: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """The task with other options, for each of the held-out sets that name some."""
    task, evaluation = tree.get("task"), tree.get("evaluation")
    named = evaluation.get("variants") if isinstance(evaluation, dict) else None
    for name, changed in (named if isinstance(named, dict) else {}).items():
        if isinstance(task, dict) and isinstance(changed, dict):
            yield ("evaluation", "variants", name), {**task, **changed}


def _made(use: _Use) -> Plugin | list[Diagnostic]:
    """A plugin with its options, or what is wrong with them, at their paths."""
    cls = load(use.kind, use.name)
    inner, faults = _build(_nested(cls, use))
    options = under_profile(cls, use.options, use.profile)
    try:
        plugin = cls.model_validate_json(to_json(options), strict=True)
    except ValidationError as error:
        from rlx.spec.explain import explain  # only where something is wrong

        keys = tuple(k for k in use.keys if k != "plugin")
        return [*explain(error, cls, dict(use.options), at=use.path, more_keys=keys), *faults]
    except Exception as error:
        what = f"failed on its options: {type(error).__name__}: {error}"
        raise PluginFault(fault(find(use.kind, use.name), what)) from error
    if faults or not cls.nested:
        return faults or plugin
    held: dict[str, dict[str, Plugin]] = {option: {} for option in cls.nested}
    for path, made in inner.items():
        held[str(path[-2])][str(path[-1])] = made
    return plugin.with_inner(held)


def _nested(cls: type[Plugin], use: _Use) -> Iterator[_Use]:
    """The plugins that a plugin's options name; what is malformed is left to its own check."""
    for option, kind in cls.nested.items():
        named = use.options.get(option)
        for key, inner in (named if isinstance(named, dict) else {}).items():
            if isinstance(inner, dict) and isinstance(inner.get("plugin"), str):
                path = (*use.path, option, key)
                yield _use(path, cast(Kind, kind), PluginUse, inner)


# Checking --------------------------------------------------------------------------------------


def resolve(spec: ExperimentSpec) -> Plugins:
    """Imports an experiment's plugins, gives them their options, and checks that all of it fits.

    Every phase is checked as well; the plugins returned are those of the experiment itself, and
    `resolve(spec.in_phase(phase))` gives a phase's own.

    Raises:
        InvalidSpec: with every fault found; InvalidPlugins when only plugins are at fault.
    """
    plugins, faults = _resolve(spec)
    if faults or plugins is None:
        raise refusal(faults, f"experiment '{spec.name}'")
    return plugins


def check(read: ReadSpec) -> Plugins:
    """As `resolve`, with every fault at its place in the file.

    Raises:
        InvalidSpec: with every fault found; InvalidPlugins when only plugins are at fault.
    """
    plugins, faults = _resolve(read.spec)
    if plugins is not None and (read.spec.critic or read.spec.monte_carlo):
        faults += unasked(read.spec, _estimators(read.spec))
    if faults or plugins is None:
        raise refusal([locate(f, read.document) for f in faults], read.document.file)
    return replace(plugins, warnings=tuple(locate(w, read.document) for w in plugins.warnings))


def check_file(path: Path, overrides: Sequence[str] = ()) -> tuple[ReadSpec, Plugins]:
    """Reads and checks one experiment with its plugins, everything that is wrong at once.

    Raises:
        InvalidSpec: with every fault found; InvalidPlugins when only plugins are at fault.
        SpecError: the file cannot be opened.
    """
    document = read_document(path, overrides)
    try:
        read = validate(document, path)
    except InvalidSpec as error:
        uses = list(_uses(document.tree))
        built, faults = _build(uses)
        more = [locate(f, document) for f in [*faults, *_parents(uses, built)]]
        raise refusal([*error.diagnostics, *more], document.file) from None
    return read, check(read)


def _resolve(spec: ExperimentSpec) -> tuple[Plugins | None, list[Diagnostic]]:
    plugins, faults = _one(spec)
    said = [*faults, *(plugins.warnings if plugins else ())]
    known = {(d.path, d.message) for d in said}
    for number, phase in enumerate(spec.phases):
        written = {"name": phase.name, "set": phase.set}
        new = (d for d in _said_in(spec, phase) if (d.path, d.message) not in known)
        said += [in_phase(d, ("phases", number), written) for d in new]
    warnings = tuple(d for d in said if d.severity == "warning")
    faults = [d for d in said if d.severity == "error"]
    return plugins and replace(plugins, warnings=warnings), faults


def _estimators(spec: ExperimentSpec) -> Iterator[Estimator]:
    """The estimator of each phase; phases that are at fault are told of elsewhere."""
    for phase in spec.phases:
        plugins, _ = _one(spec.in_phase(phase))
        if plugins is not None:
            yield plugins.estimator


def _said_in(spec: ExperimentSpec, phase: PhaseSpec) -> Iterator[Diagnostic]:
    """Faults and warnings of the experiment as it stands in a phase that changes it."""
    if phase.set:
        plugins, faults = _one(spec.in_phase(phase))
        for said in (*faults, *(plugins.warnings if plugins else ())):
            if said.path[:1] != ("model",):  # started once, before any phase
                yield said


def _one(spec: ExperimentSpec) -> tuple[Plugins | None, list[Diagnostic]]:
    """The plugins of one spec, phases aside."""
    uses = list(_uses(spec.resolved()))
    built, faults = _build(uses)
    everyone = list(_everyone(uses, built))
    faults += _parents(uses, built)
    faults += _unmet(spec, everyone, built.get(("task",)))
    if faults:
        return None, faults
    estimator = cast(Estimator, built["estimator",])
    environment = cast(Environment | None, built.get(("rollout", "environment")))
    faults = [*misfits(spec, estimator), *unspoilable(spec, built["task",])]
    faults += beyond_own(spec, cast(Mask, built["mask",]))
    judge = spec.evaluation.correct
    faults += ungraded(
        spec, built.get(("rewards", "turn", judge), built.get(("rewards", "global", judge)))
    )
    if environment is not None:
        faults += unheard(spec, environment)
    if faults:
        return None, faults
    rewards = {(str(p[1]), str(p[2])): made for p, made in built.items() if p[0] == "rewards"}
    plugins = Plugins(
        task=built["task",],
        variants={str(p[-1]): made for p, made in built.items() if p[0] == "evaluation"},
        environment=environment,
        rewards=rewards,
        mask=cast(Mask, built["mask",]),
        estimator=estimator,
        provenance=tuple(_provenance(use, plugin) for use, plugin in everyone),
        named=tuple(plugin for _, plugin in everyone),
        warnings=tuple(advice(spec, estimator, cast(Mask, built["mask",]))),
    )
    return plugins, []


def _build(uses: Iterable[_Use]) -> tuple[dict[KeyPath, Plugin], list[Diagnostic]]:
    built: dict[KeyPath, Plugin] = {}
    faults: list[Diagnostic] = []
    for use in uses:
        try:
            made = _made(use)
        except PluginFault as error:
            faults.append(replace(error.diagnostic, path=(*use.path, use.key)))
            continue
        if isinstance(made, Plugin):
            built[use.path] = made
        else:
            faults += made
    return built, faults


def _everyone(
    uses: Iterable[_Use], built: Mapping[KeyPath, Plugin]
) -> Iterator[tuple[_Use, Plugin]]:
    """Every plugin that was made, those that others hold behind their holders."""
    for use in uses:
        plugin = built.get(use.path)
        if plugin is not None:
            yield use, plugin
            inner = list(_nested(type(plugin), use))
            held = {i.path: plugin.inner(str(i.path[-2]))[str(i.path[-1])] for i in inner}
            yield from _everyone(inner, held)


def _parents(uses: Sequence[_Use], built: Mapping[KeyPath, Plugin]) -> Iterator[Diagnostic]:
    """Where `of` is missing, or pointless."""
    rewards = [use for use in uses if use.path[0] == "rewards"]
    for use in rewards:
        if use.path not in built:
            continue
        label = dotted(use.path)
        reads = getattr(built[use.path], "reads_parent", False)
        if reads and use.of is None:
            yield _conflict(
                use.path,
                f"{label} needs `of`: {use.name!r} reads the value of another reward",
                f"of: {next((str(u.path[-1]) for u in rewards if u is not use), 'NAME')}",
            )
        if not reads and use.of is not None:
            message = f"{label}.of is {use.of!r}, but {use.name!r} reads no other reward"
            yield _conflict(
                (*use.path, "of"),
                message,
                "drop `of`; a plugin of your own may read it as `@reward(reads_parent=True)`",
            )


def _unmet(
    spec: ExperimentSpec, everyone: Iterable[tuple[_Use, Plugin]], task: Plugin | None
) -> Iterator[Diagnostic]:
    """Streams that something needs and the experiment does not provide."""
    wanted = [
        ((*use.path, use.key), use, name) for use, plugin in everyone for name in needed(plugin)
    ]
    for path, use, name in wanted:
        if name not in STREAMS:
            near = did_you_mean(name, STREAMS)
            help_ = f"did you mean '{near}'?" if near else f"there are: {', '.join(STREAMS)}"
            what = f"needs '{name}', which is no stream of rlx"
            yield replace(fault(find(use.kind, use.name), what, (help_,)), path=path)
    needs = [(path, use.label, name) for path, use, name in wanted if name in STREAMS]
    if spec.model.warm_start is not None:
        wanted_of_task = "lessons" if isinstance(spec.rollout, ManyTurn) else "demonstrations"
        needs.append((("model", "warm_start"), "model.warm_start", wanted_of_task))
    for path, who, name in needs:
        stream = STREAMS[name]
        if task is not None and not stream.provided(spec, task):
            message = f"{who} needs {name}, which {stream.origin} gives: this experiment has none"
            yield _conflict(path, message, stream.help)


def _conflict(path: KeyPath, message: str, *helps: str) -> Diagnostic:
    return Diagnostic(kind="conflict", message=message, path=path, helps=helps)


def _provenance(use: _Use, made: Plugin) -> Provenance:
    plugin = find(use.kind, use.name)
    return Provenance(
        kind=use.kind,
        name=use.name,
        distribution=plugin.distribution,
        version=plugin.version,
        entry_point=plugin.value,
        sha256=fingerprint(plugin),
        options=made.model_dump(mode="json", by_alias=True),
    )
