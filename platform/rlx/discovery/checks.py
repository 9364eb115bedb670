"""Plugins with their options, and whether an experiment's plugins fit each other."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import to_json

from rlx.discovery.lookup import Kind, PluginFault, fault, find, fingerprint, load
from rlx.plugin import Estimator, Mask, Plugin
from rlx.spec import EstimatorUse, ExperimentSpec, GlobalReward, MaskUse, PluginUse, TurnReward
from rlx.spec.diagnostic import Diagnostic, InvalidSpec, KeyPath, refusal
from rlx.spec.explain import explain, locate, setting
from rlx.spec.reader import ReadSpec, read_document, validate
from rlx.spec.shape import keys_of

__all__ = ["Plugins", "Provenance", "check", "check_file", "make", "resolve"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which code a plugin's name stood for.

    Attributes:
        sha256: hex digest of the module's source; of all of a package's `.py` files when the entry
            point names a package.
    """

    kind: Kind
    name: str
    distribution: str
    version: str
    entry_point: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plugins of one experiment, with their options.

    Attributes:
        rewards: by (scope, name), such as `("turn", "accuracy")`; the scope is "turn" or "global".
        provenance: one entry per plugin named, in the order of the spec.
        warnings: what the author should know, none of which stops a run.
    """

    task: Plugin
    rewards: Mapping[tuple[str, str], Plugin]
    mask: Mask
    estimator: Estimator
    provenance: tuple[Provenance, ...]
    warnings: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class _Use:
    """One place of a spec that names a plugin. `keys` are those that are not the plugin's own."""

    path: KeyPath
    kind: Kind
    keys: tuple[str, ...]
    key: str
    name: str
    options: Mapping[str, Any]


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
    return _Use(path, kind, keys, key, tree[key], options)


def _uses(tree: Mapping[str, Any]) -> Iterator[_Use]:
    """The places of a tree that name plugins; those that are malformed are left to the reader."""
    rewards = tree.get("rewards")
    rewards = rewards if isinstance(rewards, dict) else {}
    places: list[tuple[KeyPath, Kind, type[PluginUse], Any]] = [
        (("task",), "task", PluginUse, tree.get("task"))
    ]
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
    for path, kind, model, use in places:
        key = model.model_fields["plugin"].alias or "plugin"
        if isinstance(use, dict) and isinstance(use.get(key), str):
            yield _use(path, kind, model, use)


def _made(use: _Use) -> Plugin | list[Diagnostic]:
    """A plugin with its options, or what is wrong with them, at their paths."""
    cls = load(use.kind, use.name)
    inner, faults = _build(_nested(cls, use))
    try:
        plugin = cls.model_validate_json(to_json(use.options), strict=True)
    except ValidationError as error:
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
        _, faults = _build(_uses(document.tree))
        more = [locate(f, document) for f in faults]
        raise refusal([*error.diagnostics, *more], document.file) from None
    return read, check(read)


def _resolve(spec: ExperimentSpec) -> tuple[Plugins | None, list[Diagnostic]]:
    plugins, faults = _one(spec)
    told = {(f.path, f.message) for f in faults}
    for number, phase in enumerate(spec.phases):
        if not phase.set:
            continue
        for f in _one(spec.in_phase(phase))[1]:
            if (f.path, f.message) not in told:
                path = ("phases", number, *setting(f.path, phase.set))
                message = f"{f.message} (phase '{phase.name}')"
                faults.append(replace(f, path=path, message=message))
    return plugins, faults


def _one(spec: ExperimentSpec) -> tuple[Plugins | None, list[Diagnostic]]:
    """The plugins of one spec, phases aside."""
    uses = list(_uses(spec.resolved()))
    built, faults = _build(uses)
    faults += _parents(spec, built)
    if faults:
        return None, faults
    estimator = cast(Estimator, built["estimator",])
    rewards = {(str(p[1]), str(p[2])): made for p, made in built.items() if p[0] == "rewards"}
    plugins = Plugins(
        task=built["task",],
        rewards=rewards,
        mask=cast(Mask, built["mask",]),
        estimator=estimator,
        provenance=tuple(_provenance(use) for use in _with_nested(uses)),
        warnings=tuple(_warning(text) for text in estimator.warnings()),
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


def _parents(spec: ExperimentSpec, built: Mapping[KeyPath, Plugin]) -> Iterator[Diagnostic]:
    """What is wrong with `of`: missing, pointless, dangling, or going round in a circle."""
    everything = {**spec.rewards.turn, **spec.rewards.global_}
    scopes: dict[str, Mapping[str, TurnReward] | Mapping[str, GlobalReward]] = {
        "turn": spec.rewards.turn,
        "global": spec.rewards.global_,
    }
    for scope, rewards in scopes.items():
        for name, use in rewards.items():
            path = ("rewards", scope, name)
            label = f"rewards.{scope}.{name}"
            plugin = built.get(path)
            reads = getattr(plugin, "reads_parent", False)
            if plugin is not None and reads and use.of is None:
                yield _conflict(
                    path,
                    f"{label} needs `of`: {use.plugin!r} reads the value of another reward",
                    f"of: {next((n for n in everything if n != name), 'NAME')}",
                )
            if plugin is not None and not reads and use.of is not None:
                message = f"{label}.of is {use.of!r}, but {use.plugin!r} reads no other reward"
                yield _conflict((*path, "of"), message, "drop `of`")
            if use.of is not None and use.of not in everything:
                names = ", ".join(everything)
                message = f"{label}.of is {use.of!r}, which is not a reward; there are: {names}"
                yield _conflict((*path, "of"), message)
        yield from _circles(scope, {n: use.of for n, use in rewards.items() if use.of is not None})


def _circles(scope: str, parents: Mapping[str, str]) -> Iterator[Diagnostic]:
    """One fault per circle, at its first reward."""
    done: set[str] = set()
    for start in parents:
        trail: list[str] = []
        name: str | None = start
        while name is not None and name not in done:
            if name in trail:
                round_ = [*trail[trail.index(name) :], name]
                message = f"rewards.{scope}.{name}.of goes round in a circle: {' → '.join(round_)}"
                yield _conflict(("rewards", scope, name, "of"), message)
                break
            trail.append(name)
            name = parents.get(name)
        done.update(trail)


def _conflict(path: KeyPath, message: str, *helps: str) -> Diagnostic:
    return Diagnostic(kind="conflict", message=message, path=path, helps=helps)


def _warning(text: str) -> Diagnostic:
    """An estimator's warning; it stands at the key that the sentence begins with."""
    word = text.split()[0] if text.split() else ""
    path = tuple(word.split(".")) if word.startswith("estimator.") else ("estimator",)
    return Diagnostic(kind="conflict", message=text, path=path, severity="warning")


def _with_nested(uses: Iterable[_Use]) -> Iterator[_Use]:
    for use in uses:
        yield use
        yield from _with_nested(_nested(load(use.kind, use.name), use))


def _provenance(use: _Use) -> Provenance:
    plugin = find(use.kind, use.name)
    return Provenance(
        kind=use.kind,
        name=use.name,
        distribution=plugin.distribution,
        version=plugin.version,
        entry_point=plugin.value,
        sha256=fingerprint(plugin),
    )
