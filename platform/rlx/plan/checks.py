"""Reads and checks a whole experiment: its values, its plugins and their fit, in every phase."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlx.discovery import BuiltPlugins, ExperimentPlugins, build_named_plugins, resolve_plugins
from rlx.plan.plugin_checks import (
    check_needed_streams,
    check_parent_rewards,
    check_plugin_fit,
    check_unused_value_sources,
    collect_spec_warnings,
)
from rlx.spec import ExperimentSpec, KeyPath, PhaseSpec, find_contradictions, get_at_path, has_path
from rlx.spec.reading import (
    Diagnostic,
    InvalidSpec,
    LoadedSpec,
    YamlDocument,
    build_error,
    build_refusal,
    locate_diagnostic,
    read_document,
    read_own_values,
    relocate_phase_fault,
    suggest_name,
    validate_values,
)

_OF_VALUES = ("unknown_key", "value", "plugin")
"""Kinds of fault that one value has, whatever the others are."""


def read_spec(path: Path, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Reads and validates one experiment, without its plugins and their options.

    Args:
        overrides: `path.to.key=value`, applied in order; values are YAML.

    Raises:
        InvalidSpec: lists every error in the file or the overrides.
        SpecError: the file cannot be opened.
    """
    return validate_document(read_document(path, overrides))


def validate_document(document: YamlDocument) -> LoadedSpec:
    """Validates a document as an experiment, without its plugins.

    Raises:
        InvalidSpec: lists every error in the document.
    """
    spec, faults = check_spec_tree(document.tree)
    if faults or spec is None:
        raise document.build_refusal(faults)
    return LoadedSpec(document, spec)


def check_read_spec(read: LoadedSpec) -> ExperimentPlugins:
    """Builds an experiment's plugins, and checks that they fit it and each other in every phase.

    Raises:
        InvalidSpec: lists every fault found; InvalidPlugins if only plugins are at fault.
    """
    spec = read.spec
    plugins, found = _check_plugins(spec)

    def check_phase(phase: PhaseSpec) -> Iterator[Diagnostic]:
        for fault in _check_plugins(spec.resolve_phase_spec(phase))[1]:
            if fault.path[:1] != ("model",):  # the model is built once, before any phase
                yield fault

    found += find_in_phases(spec, found, check_phase)
    if not _list_errors(found):
        phases = (resolve_plugins(spec.resolve_phase_spec(phase)) for phase in spec.phases)
        found += check_unused_value_sources(spec, (each.estimator for each in phases))
    if faults := _list_errors(found):
        raise read.document.build_refusal(faults)
    warnings = tuple(locate_diagnostic(warning, read.document) for warning in found)
    return replace(plugins.to_experiment(spec), warnings=warnings)


def check_file(
    source: Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> tuple[LoadedSpec, ExperimentPlugins]:
    """Reads and checks one experiment, a file or its content, with its plugins.

    Raises:
        InvalidSpec: lists every fault found; InvalidPlugins if only plugins are at fault.
        SpecError: the file cannot be opened.
    """
    try:
        document = read_document(source, overrides)
    except InvalidSpec as error:
        others = _check_without_base(source) if isinstance(source, Path) else ()
        raise build_refusal([*error.diagnostics, *others], error.file) from None
    spec, faults = check_spec_tree(document.tree)
    if spec is not None and not faults:
        read = LoadedSpec(document, spec)
        return read, check_read_spec(read)
    if spec is not None:
        faults += _list_errors(_check_plugins(spec)[1])
    else:
        plugins = build_named_plugins(document.tree)
        faults += [*plugins.faults, *check_parent_rewards(plugins)]
    raise document.build_refusal(faults)


def _check_without_base(path: Path) -> Iterator[Diagnostic]:
    """Yields the errors of a file that no base could mend, where its base cannot be read.

    What the file leaves out, contradicts or sets to null may be right with its base.
    """
    try:
        document = read_own_values(path)
    except InvalidSpec:
        return  # it is the file that cannot be read
    if document is None:
        return
    for fault in (
        *validate_values(ExperimentSpec, document.tree)[1],
        *build_named_plugins(document.tree).faults,
    ):
        written = get_at_path(document.tree, fault.path)
        if fault.kind in _OF_VALUES and written is not None:
            yield locate_diagnostic(fault, document)


def _check_plugins(spec: ExperimentSpec) -> tuple[BuiltPlugins, list[Diagnostic]]:
    """Builds and checks the plugins of one spec, without its phases.

    Returns:
        The plugins, and either errors or, if there are none, warnings.
    """
    plugins = build_named_plugins(spec.dump_resolved())
    found = [
        *plugins.faults,
        *check_parent_rewards(plugins),
        *check_needed_streams(spec, plugins),
        *check_plugin_fit(spec, plugins),
    ]
    errors = _list_errors(found)
    return plugins, errors or [*found, *collect_spec_warnings(spec, plugins)]


def _list_errors(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    return [one for one in found if one.severity == "error"]


def check_spec_tree(tree: Any) -> tuple[ExperimentSpec | None, list[Diagnostic]]:
    """Returns the experiment that a tree holds, None if it holds none, and every error in it."""
    spec, faults = validate_values(ExperimentSpec, tree)
    if spec is None:
        return None, [*faults, *_find_hidden_errors(tree, faults)]
    return spec, list(_find_spec_errors(spec))


def _find_spec_errors(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields values that contradict each other, and what a phase's `set` makes invalid.

    What a phase shares with the experiment is reported once.
    """

    def check_phase(phase: PhaseSpec) -> Iterator[Diagnostic]:
        resolved, faults = validate_values(ExperimentSpec, spec.apply_phase(phase)[0])
        yield from faults if resolved is None else find_contradictions(resolved)

    own = [*find_contradictions(spec), *_check_phase_settings(spec)]
    yield from own
    yield from find_in_phases(spec, own, check_phase)


def _check_phase_settings(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields names that phases share, and entries of `set` that cannot be applied, or that a later
    entry replaces as a whole."""
    names: set[str] = set()
    for number, phase in enumerate(spec.phases):
        at: KeyPath = ("phases", number)
        if phase.name in names:
            message = f"phases.{number}.name is {phase.name!r}, the name of an earlier phase"
            yield build_error((*at, "name"), message)
        names.add(phase.name)
        for setting in spec.apply_phase(phase)[1]:
            yield build_error(
                (*at, "set", setting.path),
                f"{setting.message} (phase '{phase.name}')",
                suggest_name(setting.path, setting.choices),
                kind="unknown_key",
            )
        keys = list(phase.set)
        for place, key in enumerate(keys):
            if whole := next((k for k in keys[place + 1 :] if key.startswith(f"{k}.")), ""):
                message = f"{key!r} has no effect: {whole!r} replaces it (phase '{phase.name}')"
                yield build_error((*at, "set", key), message, f"write it after {whole!r}, or in it")


# Recovery --------------------------------------------------------------------------------------


_PLACEHOLDERS: Mapping[str, Any] = {
    "name": "name",
    "model": {"kind": "tiny"},
    "task": {"plugin": "none"},
    "phases": [{"name": "phase", "steps": 1}],
}
"""Values that let validation go on where a required section is missing."""
_KIND_KEYS = ("kind", "schedule", "engine")
"""Keys that select which other keys a section has."""
_ROUNDS = 4
"""Removing a required key makes its section invalid, then the one above it."""


def _find_hidden_errors(tree: Any, faults: Sequence[Diagnostic]) -> Iterator[Diagnostic]:
    """Yields errors among the valid values, which validation does not reach after `faults`.

    Misspelt keys and kinds are replaced by those that were probably meant, and malformed values are
    removed; errors that concern these are dropped.
    """
    mended = deepcopy(tree)
    guessed = {(*fault.path[:-1], fault.meant) for fault in faults if fault.meant}
    reported = {(fault.path, fault.message) for fault in faults}
    left_out: set[KeyPath] = set()
    wrong = list(faults)
    for _ in range(_ROUNDS):
        left_out |= {path for fault in wrong if (path := _repair_section(mended, fault))}
        spec, wrong = validate_values(ExperimentSpec, mended)
        if spec is not None:  # nearly everything has to fit the schedule
            wrong = [] if ("rollout",) in left_out else list(_find_spec_errors(spec))
        for fault in wrong:
            told = (fault.path, fault.message)
            # It may be only a consequence of what was left out.
            follows = any(
                _has_path_overlap(fault.path, path)
                or _has_path_overlap(fault.against, path)
                or (path[0] == "rewards" and f"'{path[-1]}'" in fault.message)
                for path in left_out
            )
            if told not in reported and fault.path not in guessed and not follows:
                reported.add(told)
                yield fault
        if spec is not None:
            return


def _repair_section(tree: Any, fault: Diagnostic) -> KeyPath:
    """Replaces or removes the value that a fault is about; returns its path unless the valid key or
    name is known."""
    path = fault.path
    if not path:
        return ()
    if fault.kind == "missing_key" or (path[-1] in _KIND_KEYS and not fault.meant):
        return _leave_out(tree, path[:-1] or path)
    owner = _find_container(tree, path)
    if owner is not None and fault.meant and fault.kind == "value":
        owner[path[-1]] = fault.meant
        return ()
    if owner is not None and fault.meant and fault.meant not in owner:
        owner[fault.meant] = owner.pop(path[-1])
        return ()
    return _leave_out(tree, path)


def _leave_out(tree: Any, path: KeyPath) -> KeyPath:
    """Removes a value, or puts a placeholder there; returns its path."""
    while path and isinstance(path[-1], int):
        path = path[:-1]  # removing one item would shift the indices of the following ones
    if len(path) == 1 and path[0] in _PLACEHOLDERS:
        tree[path[0]] = deepcopy(_PLACEHOLDERS[str(path[0])])
    elif (owner := _find_container(tree, path)) is not None:
        owner.pop(path[-1])
    return path


def _find_container(tree: Any, path: KeyPath) -> Any:
    """Returns the mapping or list that contains `path`, or None."""
    return get_at_path(tree, path[:-1]) if path and has_path(tree, path) else None


def _has_path_overlap(one: KeyPath, other: KeyPath) -> bool:
    """Whether one of two paths is a prefix of the other."""
    return bool(one) and all(mine == theirs for mine, theirs in zip(one, other, strict=False))


def find_in_phases(
    spec: ExperimentSpec,
    own: Sequence[Diagnostic],
    check: Callable[[PhaseSpec], Iterable[Diagnostic]],
) -> Iterator[Diagnostic]:
    """Yields what `check` finds in phases with a `set`, located at the setting that causes it.

    Args:
        own: what the experiment itself has; it is left out.
    """
    known = {(found.path, found.message) for found in own}
    faulty = {found.path for found in own if found.severity == "error"}
    for number, phase in enumerate(spec.phases):
        keys = [tuple(key.split(".")) for key in phase.set]
        for found in check(phase) if phase.set else ():
            paths = [tuple(map(str, path)) for path in (found.path, found.against) if path]
            is_set = any(_has_path_overlap(key, path) for key in keys for path in paths)
            follows = found.path in faulty and not is_set
            if (found.path, found.message) not in known and not follows:
                yield relocate_phase_fault(found, number, phase)
