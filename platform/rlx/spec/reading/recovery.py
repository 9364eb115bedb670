"""Error recovery: continues validation past the first errors, so that they do not hide others."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from rlx.spec.base import Contradiction, KeyPath
from rlx.spec.experiment import ExperimentSpec
from rlx.spec.reading.diagnostics import Diagnostic
from rlx.spec.reading.explain import explain_validation_error

__all__ = ["find_hidden_contradictions"]


def find_hidden_contradictions(
    error: ValidationError, tree: Any, faults: Sequence[Diagnostic]
) -> list[Diagnostic]:
    """Finds contradictions among the valid values, which validation does not reach after an error.

    Misspelt keys are renamed to the keys that were probably meant and malformed values are removed;
    faults that concern removed values are dropped.

    Args:
        error: raised by the validation of the experiment.
        tree: the experiment as written.
        faults: the diagnostics of `error`.
    """
    if any(isinstance(e.get("ctx", {}).get("error"), Contradiction) for e in error.errors()):
        return []  # validation got that far
    mended = deepcopy(tree)
    left_out = [path for fault in faults if (path := _repair_key(mended, fault))]
    try:
        ExperimentSpec.model_validate_json(to_json(mended), strict=True)
    except ValidationError as another:
        reported = {(fault.path, fault.message) for fault in faults}
        return [
            fault
            for fault in explain_validation_error(another, ExperimentSpec, mended)
            if (fault.path, fault.message) not in reported
            and (_find_container(mended, fault.path) or _find_container(mended, fault.against))
            and not any(
                _has_path_overlap(fault.path, p) or _has_path_overlap(fault.against, p)
                for p in left_out
            )
        ]
    return []


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
