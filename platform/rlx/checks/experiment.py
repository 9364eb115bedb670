"""Reads and checks a whole experiment: its values, its plugins and their fit, in every phase."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rlx.checks.phases import find_in_phases
from rlx.checks.plugin_advice import collect_spec_warnings
from rlx.checks.plugin_fit import check_plugin_fit, check_unused_value_sources
from rlx.checks.plugin_needs import check_needed_streams, check_parent_rewards
from rlx.checks.spec import check_spec_tree, find_value_errors
from rlx.discovery import (
    BuiltPlugins,
    ExperimentPlugins,
    build_named_plugins,
    resolve_plugins,
)
from rlx.plugin import Estimator
from rlx.spec import ExperimentSpec, PhaseSpec
from rlx.spec.reading import (
    Diagnostic,
    InvalidSpec,
    LoadedSpec,
    YamlDocument,
    build_refusal,
    locate_diagnostic,
    read_document,
    read_own_values,
)

__all__ = ["check_file", "check_read_spec", "read_spec", "validate_document"]

_OF_VALUES = ("unknown_key", "value", "plugin")
"""Kinds of fault that one value has, whatever the others are."""


def read_spec(path: Path, overrides: Sequence[str] = ()) -> LoadedSpec:
    """Reads and validates one experiment, without its plugins and their options.

    Args:
        path: a YAML file.
        overrides: `path.to.key=value`, applied in order; values are YAML.

    Raises:
        InvalidSpec: lists every error in the file or the overrides.
        SpecError: the file cannot be opened.
    """
    return validate_document(read_document(path, overrides), path)


def validate_document(document: YamlDocument, path: Path) -> LoadedSpec:
    """Validates a document as an experiment, without its plugins.

    Raises:
        InvalidSpec: lists every error in the document.
    """
    spec, faults = check_spec_tree(document.tree)
    if faults or spec is None:
        raise _locate_refusal(faults, document)
    return LoadedSpec.from_document(path, document, spec)


def check_read_spec(read: LoadedSpec) -> ExperimentPlugins:
    """Builds an experiment's plugins, and checks that they fit it and each other in every phase.

    The returned plugins are those of the experiment itself; for those of a phase, use
    `resolve_plugins(spec.resolve_phase_spec(phase))`.

    Raises:
        InvalidSpec: lists every fault found; InvalidPlugins if only plugins are at fault.
    """
    spec = read.spec
    plugins, found = _check_plugins(spec)
    found += find_in_phases(spec, found, lambda phase: _check_phase_plugins(spec, phase))
    if not _list_errors(found):
        found += check_unused_value_sources(spec, _list_phase_estimators(spec))
    if faults := _list_errors(found):
        raise _locate_refusal(faults, read.document)
    warnings = tuple(locate_diagnostic(warning, read.document) for warning in found)
    return replace(plugins.to_experiment(), warnings=warnings)


def check_file(path: Path, overrides: Sequence[str] = ()) -> tuple[LoadedSpec, ExperimentPlugins]:
    """Reads and checks one experiment with its plugins, and reports all errors at once.

    Raises:
        InvalidSpec: lists every fault found; InvalidPlugins if only plugins are at fault.
        SpecError: the file cannot be opened.
    """
    try:
        document = read_document(path, overrides)
    except InvalidSpec as error:
        faults = [*error.diagnostics, *_check_without_base(path)]
        raise build_refusal(faults, error.file) from None
    spec, faults = check_spec_tree(document.tree)
    if spec is not None and not faults:
        read = LoadedSpec.from_document(path, document, spec)
        return read, check_read_spec(read)
    if spec is not None:
        faults += _list_errors(_check_plugins(spec)[1])
    else:
        plugins = build_named_plugins(document.tree)
        faults += [*plugins.faults, *check_parent_rewards(plugins)]
    raise _locate_refusal(faults, document)


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
    for fault in (*find_value_errors(document.tree), *build_named_plugins(document.tree).faults):
        with suppress(LookupError):
            written = document.get_value_at(fault.path)
            if fault.kind in _OF_VALUES and written is not None:
                yield locate_diagnostic(fault, document)


def _check_plugins(spec: ExperimentSpec) -> tuple[BuiltPlugins, list[Diagnostic]]:
    """Builds and checks the plugins of one spec, without its phases.

    Returns:
        The plugins, and either errors or, if there are none, warnings.
    """
    plugins = build_named_plugins(spec.dump_resolved())
    faults = [
        *plugins.faults,
        *check_parent_rewards(plugins),
        *check_needed_streams(spec, plugins),
        *check_plugin_fit(spec, plugins),
    ]
    return plugins, faults or list(collect_spec_warnings(spec, plugins))


def _check_phase_plugins(spec: ExperimentSpec, phase: PhaseSpec) -> Iterator[Diagnostic]:
    for found in _check_plugins(spec.resolve_phase_spec(phase))[1]:
        if found.path[:1] != ("model",):  # the model is built once, before any phase
            yield found


def _list_phase_estimators(spec: ExperimentSpec) -> Iterator[Estimator]:
    for phase in spec.phases:
        yield resolve_plugins(spec.resolve_phase_spec(phase)).estimator


def _list_errors(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    return [one for one in found if one.severity == "error"]


def _locate_refusal(faults: Iterable[Diagnostic], document: YamlDocument) -> InvalidSpec:
    return build_refusal([locate_diagnostic(f, document) for f in faults], document.file)
