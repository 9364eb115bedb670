"""Runs a check on every phase, and reports once what phases share with the experiment."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rlx.spec import ExperimentSpec, PhaseSpec
from rlx.spec.reading import Diagnostic, relocate_phase_fault

__all__ = ["find_in_phases"]


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
        at = ("phases", number)
        for found in check(phase) if phase.set else ():
            moved = relocate_phase_fault(found, at, {"name": phase.name, "set": phase.set})
            follows = found.path in faulty and not _is_set(found, phase)
            if (found.path, found.message) not in known and not follows:
                yield moved


def _is_set(found: Diagnostic, phase: PhaseSpec) -> bool:
    """Whether the phase itself sets a value that a fault is about, or a part of it."""
    keys = [tuple(key.split(".")) for key in phase.set]
    paths = [tuple(map(str, path)) for path in (found.path, found.against) if path]
    return any(
        all(mine == theirs for mine, theirs in zip(key, path, strict=False))
        for key in keys
        for path in paths
    )
