"""Errors that the spec alone shows, in the experiment itself and in each of its phases."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from rlx.checks.contradictions import find_contradictions
from rlx.checks.phases import find_in_phases
from rlx.spec import ExperimentSpec, KeyPath, PhaseSpec
from rlx.spec.reading import (
    Diagnostic,
    build_error,
    explain_validation_error,
    suggest_name,
)

__all__ = ["check_spec_tree", "find_spec_errors", "parse_spec_tree"]


def parse_spec_tree(tree: Any) -> ExperimentSpec:
    """Returns plain values as an experiment, each value checked on its own.

    Raises:
        ValidationError: a value is invalid.
    """
    # Strict JSON mode accepts a list for a tuple, but rejects "5" or true for a number.
    return ExperimentSpec.model_validate_json(to_json(tree), strict=True)


def check_spec_tree(tree: Any) -> tuple[ExperimentSpec | None, list[Diagnostic]]:
    """Returns the experiment that a tree holds, None if it holds none, and every error in it."""
    try:
        spec = parse_spec_tree(tree)
    except ValidationError as error:
        faults = explain_validation_error(error, ExperimentSpec, tree)
        return None, [*faults, *_find_hidden_errors(tree, faults)]
    return spec, list(find_spec_errors(spec))


def find_spec_errors(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields values that contradict each other, and what a phase's `set` makes invalid.

    What a phase shares with the experiment is reported once.
    """
    own = [*find_contradictions(spec), *_check_phase_settings(spec)]
    yield from own
    yield from find_in_phases(spec, own, lambda phase: _find_phase_errors(spec, phase))


def _check_phase_settings(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields names that phases share, and entries of `set` that cannot be applied."""
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
        yield from _check_discarded_settings(phase, at)


def _check_discarded_settings(phase: PhaseSpec, at: KeyPath) -> Iterator[Diagnostic]:
    """Yields entries of `set` that a later entry replaces as a whole."""
    keys = list(phase.set)
    for number, key in enumerate(keys):
        if whole := next((k for k in keys[number + 1 :] if key.startswith(f"{k}.")), ""):
            message = f"{key!r} has no effect: {whole!r} replaces it (phase '{phase.name}')"
            yield build_error((*at, "set", key), message, f"write it after {whole!r}, or in it")


def _find_phase_errors(spec: ExperimentSpec, phase: PhaseSpec) -> Iterator[Diagnostic]:
    tree, _ = spec.apply_phase(phase)
    try:
        yield from find_contradictions(parse_spec_tree(tree))
    except ValidationError as error:
        yield from explain_validation_error(error, ExperimentSpec, tree)


# Recovery --------------------------------------------------------------------------------------


def _find_hidden_errors(tree: Any, faults: Sequence[Diagnostic]) -> Iterator[Diagnostic]:
    """Yields errors among the valid values, which validation does not reach after `faults`.

    Misspelt keys are renamed to the keys that were probably meant and malformed values are removed;
    errors that concern removed values are dropped, and those of a renamed key's own value, since
    another key may have been meant.
    """
    mended = deepcopy(tree)
    guessed = {(*fault.path[:-1], fault.meant) for fault in faults if fault.meant}
    left_out = [path for fault in faults if (path := _repair_key(mended, fault))]
    try:
        hidden = list(find_spec_errors(parse_spec_tree(mended)))
    except ValidationError as error:
        hidden = explain_validation_error(error, ExperimentSpec, mended)
    reported = {(fault.path, fault.message) for fault in faults}
    for fault in hidden:
        both = (fault.path, fault.against)
        if (
            (fault.path, fault.message) not in reported
            and fault.path not in guessed
            and any(_find_container(mended, path) for path in both)
            and not any(_has_path_overlap(path, p) for path in both for p in left_out)
        ):
            yield fault


def _repair_key(tree: Any, fault: Diagnostic) -> KeyPath:
    """Renames or removes the key that a fault is about; returns its path if it was removed."""
    path = fault.path
    while path and isinstance(path[-1], int):
        path = path[:-1]  # removing one item would shift the indices of the following ones
    owner = _find_container(tree, path)
    if owner is None:
        return ()
    value = owner.pop(path[-1])
    if fault.meant and fault.meant not in owner:
        owner[fault.meant] = value
        return ()
    return path


def _find_container(tree: Any, path: KeyPath) -> Any:
    """Returns the mapping or list that contains `path`, or None."""
    owner = None
    for step in path:
        owner = tree
        fits = isinstance(owner, list) if isinstance(step, int) else isinstance(owner, dict)
        if not fits or (step >= len(owner) if isinstance(step, int) else step not in owner):
            return None
        tree = owner[step]
    return owner


def _has_path_overlap(one: KeyPath, other: KeyPath) -> bool:
    """Whether one of two paths is a prefix of the other."""
    return bool(one) and all(mine == theirs for mine, theirs in zip(one, other, strict=False))
