"""Builds an experiment's plugins and checks that they fit the experiment and each other."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rlx.discovery.advice import collect_spec_warnings
from rlx.discovery.fit import (
    check_correctness_judge,
    check_estimator_fit,
    check_mask_reach,
    check_reward_turns,
    check_task_corruption,
    check_unused_value_sources,
)
from rlx.discovery.lookup import build_plugin_diagnostic, find_installed_plugin
from rlx.discovery.places import (
    PluginReference,
    Provenance,
    build_all_plugins,
    build_provenance,
    list_built_plugins,
    plugin_places,
)
from rlx.discovery.streams import NEEDS, list_needed_streams
from rlx.plugin import Environment, Estimator, Mask, Plugin
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec, KeyPath, PhaseSpec
from rlx.spec.reading import (
    Diagnostic,
    InvalidSpec,
    LoadedSpec,
    build_refusal,
    did_you_mean,
    format_key_path,
    locate_diagnostic,
    read_document,
    relocate_phase_fault,
    validate_document,
)

__all__ = ["ExperimentPlugins", "check_file", "check_read_spec", "resolve_plugins"]


@dataclass(frozen=True, slots=True)
class ExperimentPlugins:
    """The plugins of one experiment, built with their options.

    Attributes:
        variants: the task with the options of each of `evaluation.variants`.
        environment: None if the schedule has none.
        rewards: by (scope, name), such as `("turn", "accuracy")`; the scope is "turn" or "global".
        provenance: one entry per plugin, in the order of the spec.
        named: the plugins, in the same order as `provenance`.
        warnings: diagnostics that do not stop a run.
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


def resolve_plugins(spec: ExperimentSpec) -> ExperimentPlugins:
    """Imports an experiment's plugins, builds them with their options, and checks that they fit.

    Every phase is checked too. The returned plugins are those of the experiment itself; for those
    of a phase, use `resolve_plugins(spec.resolve_phase_spec(phase))`.

    Raises:
        InvalidSpec: lists every fault found; InvalidPlugins if only plugins are at fault.
    """
    plugins, faults = _resolve_all_phases(spec)
    if faults or plugins is None:
        raise build_refusal(faults, f"experiment '{spec.name}'")
    return plugins


def check_read_spec(read: LoadedSpec) -> ExperimentPlugins:
    """Like `resolve_plugins`, with the source location of every fault.

    Raises:
        InvalidSpec: lists every fault found; InvalidPlugins if only plugins are at fault.
    """
    plugins, faults = _resolve_all_phases(read.spec)
    if plugins is not None:
        faults += check_unused_value_sources(read.spec, _list_phase_estimators(read.spec))
    if faults or plugins is None:
        raise build_refusal(
            [locate_diagnostic(f, read.document) for f in faults], read.document.file
        )
    return replace(
        plugins, warnings=tuple(locate_diagnostic(w, read.document) for w in plugins.warnings)
    )


def check_file(path: Path, overrides: Sequence[str] = ()) -> tuple[LoadedSpec, ExperimentPlugins]:
    """Reads and checks one experiment with its plugins, and reports all errors at once.

    Raises:
        InvalidSpec: lists every fault found; InvalidPlugins if only plugins are at fault.
        SpecError: the file cannot be opened.
    """
    document = read_document(path, overrides)
    try:
        read = validate_document(document, path)
    except InvalidSpec as error:
        places = list(plugin_places(document.tree))
        built, faults = build_all_plugins(places)
        more = [
            locate_diagnostic(f, document) for f in [*faults, *_check_parent_rewards(places, built)]
        ]
        raise build_refusal([*error.diagnostics, *more], document.file) from None
    return read, check_read_spec(read)


def _resolve_all_phases(spec: ExperimentSpec) -> tuple[ExperimentPlugins | None, list[Diagnostic]]:
    plugins, faults = _resolve_one_spec(spec)
    diagnostics = [*faults, *(plugins.warnings if plugins else ())]
    known = {(d.path, d.message) for d in diagnostics}
    for number, phase in enumerate(spec.phases):
        written = {"name": phase.name, "set": phase.set}
        new = (d for d in _check_phase(spec, phase) if (d.path, d.message) not in known)
        diagnostics += [relocate_phase_fault(d, ("phases", number), written) for d in new]
    warnings = tuple(d for d in diagnostics if d.severity == "warning")
    faults = [d for d in diagnostics if d.severity == "error"]
    return plugins and replace(plugins, warnings=warnings), faults


def _list_phase_estimators(spec: ExperimentSpec) -> Iterator[Estimator]:
    """Yields the estimator of each phase; invalid phases are skipped and reported elsewhere."""
    for phase in spec.phases:
        plugins, _ = _resolve_one_spec(spec.resolve_phase_spec(phase))
        if plugins is not None:
            yield plugins.estimator


def _check_phase(spec: ExperimentSpec, phase: PhaseSpec) -> Iterator[Diagnostic]:
    """Yields the faults and warnings of the experiment with a phase's `set` applied."""
    if phase.set:
        plugins, faults = _resolve_one_spec(spec.resolve_phase_spec(phase))
        for diagnostic in (*faults, *(plugins.warnings if plugins else ())):
            if diagnostic.path[:1] != ("model",):  # the model is built once, before any phase
                yield diagnostic


def _resolve_one_spec(spec: ExperimentSpec) -> tuple[ExperimentPlugins | None, list[Diagnostic]]:
    """Builds and checks the plugins of one spec, without its phases."""
    places = list(plugin_places(spec.dump_resolved()))
    built, faults = build_all_plugins(places)
    all_plugins = list(list_built_plugins(places, built))
    faults += _check_parent_rewards(places, built)
    faults += _check_needed_streams(spec, all_plugins, built.get(("task",)))
    if faults:
        return None, faults
    estimator = cast(Estimator, built["estimator",])
    environment = cast(Environment | None, built.get(("rollout", "environment")))
    faults = [*check_estimator_fit(spec, estimator), *check_task_corruption(spec, built["task",])]
    faults += check_mask_reach(spec, cast(Mask, built["mask",]))
    judge = spec.evaluation.correct
    faults += check_correctness_judge(
        spec, built.get(("rewards", "turn", judge), built.get(("rewards", "global", judge)))
    )
    if environment is not None:
        faults += check_reward_turns(spec, environment)
    if faults:
        return None, faults
    rewards = {(str(p[1]), str(p[2])): made for p, made in built.items() if p[0] == "rewards"}
    plugins = ExperimentPlugins(
        task=built["task",],
        variants={str(p[-1]): made for p, made in built.items() if p[0] == "evaluation"},
        environment=environment,
        rewards=rewards,
        mask=cast(Mask, built["mask",]),
        estimator=estimator,
        provenance=tuple(build_provenance(place, plugin) for place, plugin in all_plugins),
        named=tuple(plugin for _, plugin in all_plugins),
        warnings=tuple(
            collect_spec_warnings(
                spec,
                estimator,
                cast(Mask, built["mask",]),
                ((place.path, plugin) for place, plugin in all_plugins),
            )
        ),
    )
    return plugins, []


def _check_parent_rewards(
    places: Sequence[PluginReference], built: Mapping[KeyPath, Plugin]
) -> Iterator[Diagnostic]:
    """Reports a missing `of`, or one that the reward does not read."""
    rewards = [place for place in places if place.path[0] == "rewards"]
    for place in rewards:
        if place.path not in built:
            continue
        label = format_key_path(place.path)
        reads = getattr(built[place.path], "reads_parent", False)
        if reads and place.of is None:
            yield _build_plugin_conflict(
                place.path,
                f"{label} needs `of`: {place.name!r} reads the value of another reward",
                f"of: {next((str(u.path[-1]) for u in rewards if u is not place), 'NAME')}",
            )
        if not reads and place.of is not None:
            message = f"{label}.of is {place.of!r}, but {place.name!r} reads no other reward"
            yield _build_plugin_conflict(
                (*place.path, "of"),
                message,
                "drop `of`; your own plugin can read it if declared as "
                "`@reward(reads_parent=True)`",
            )


def _check_needed_streams(
    spec: ExperimentSpec, plugins: Iterable[tuple[PluginReference, Plugin]], task: Plugin | None
) -> Iterator[Diagnostic]:
    """Reports streams that a plugin or warm start needs and the experiment does not provide."""
    wanted = [
        ((*place.path, place.key), place, name)
        for place, plugin in plugins
        for name in list_needed_streams(plugin)
    ]
    for path, place, name in wanted:
        if name not in NEEDS:
            near = did_you_mean(name, NEEDS)
            help_ = f"did you mean '{near}'?" if near else f"there are: {', '.join(NEEDS)}"
            what = f"needs '{name}', which is not an rlx stream"
            yield replace(
                build_plugin_diagnostic(
                    find_installed_plugin(place.kind, place.name), what, (help_,)
                ),
                path=path,
            )
    needs = [(path, place.label, name) for path, place, name in wanted if name in NEEDS]
    if spec.model.warm_start is not None:
        wanted_of_task = (
            "lessons" if isinstance(spec.rollout, EnvironmentRolloutSpec) else "demonstrations"
        )
        needs.append((("model", "warm_start"), "model.warm_start", wanted_of_task))
    for path, who, name in needs:
        provider = NEEDS[name]
        if task is not None and not provider.is_present(spec, task):
            message = (
                f"{who} needs {name}, which {provider.origin} provides: this experiment has none"
            )
            yield _build_plugin_conflict(path, message, provider.help)


def _build_plugin_conflict(path: KeyPath, message: str, *helps: str) -> Diagnostic:
    return Diagnostic(kind="conflict", message=message, path=path, helps=helps)
