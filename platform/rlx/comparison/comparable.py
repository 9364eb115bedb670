"""Selects the evaluations that `rlx compare` may average: those with the same settings."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.spec import OWN_SUITE
from rlx.text import escape_unprintable
from rlx_registry import EvaluationRecord, RunRecord, find_changed_plugins

__all__ = [
    "ExcludedEvaluation",
    "ExcludedRun",
    "describe_plugin_mixture",
    "list_excluded_runs",
    "select_comparable_evaluations",
    "select_newest_runs",
]

Evaluations = dict[str, list[EvaluationRecord]]
"""Evaluations by run id."""


@dataclass(frozen=True, slots=True)
class ExcludedEvaluation:
    """An evaluation whose settings differ from those of most evaluations of its suite.

    Attributes:
        why: the settings that differ.
    """

    suite: str
    run: str
    why: str


@dataclass(frozen=True, slots=True)
class ExcludedRun:
    """A named run that no recipe of a comparison contains, and why."""

    run: str
    why: str


def list_excluded_runs(
    named: Iterable[RunRecord], taken: Iterable[RunRecord]
) -> Iterator[ExcludedRun]:
    """Yields the named runs that were not taken: the unfinished, and those with a newer twin."""
    instead = {(run.digest, run.seed): run for run in taken}
    for run in named:
        twin = instead.get((run.digest, run.seed))
        if twin is not None and twin.id == run.id:
            continue
        status = run.effective_status
        why = [] if run.status == "finished" else [f"it is {status}"]
        if twin is not None:
            newer = "" if why else ", and is newer"
            why.append(f"{twin.id} has the same spec and seed{newer}")
            if changed := find_changed_plugins(twin.plugins, run.plugins):
                why.append(f"{', '.join(changed)} changed between them")
        yield ExcludedRun(run.id, "; ".join(why))


def describe_plugin_mixture(label: str, runs: Iterable[RunRecord]) -> Iterator[str]:
    """Yields a sentence if the runs of one recipe did not have the same plugins."""
    first, *others = runs
    for run in others:
        if changed := find_changed_plugins(run.plugins, first.plugins):
            names = escape_unprintable(", ".join(changed))
            yield f"{label} mixes plugins: {names} changed between {first.id} and {run.id}."
            return


def select_newest_runs(runs: Sequence[RunRecord]) -> dict[int, RunRecord]:
    """Returns the newest run of each seed, ordered by seed."""
    ordered = sorted(runs, key=lambda run: int(run.id.rpartition("-")[2]))
    return dict(sorted({run.seed: run for run in ordered}.items()))


def select_comparable_evaluations(
    runs: Sequence[RunRecord], evaluations: Evaluations
) -> tuple[Evaluations, tuple[ExcludedEvaluation, ...]]:
    """Selects the evaluations that have the most common settings of their suite.

    Args:
        runs: in order of precedence: on a tie, the settings of the earliest run win.
        evaluations: by run id, at most one per suite.

    Returns:
        The evaluations that were kept, by run id, and those that were excluded.
    """
    ways: dict[str, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        for one in evaluations[run.id]:
            ways.setdefault(one.suite, {})[run.id] = _get_evaluation_settings(one, run.seed)
    usual = {suite: _find_usual_settings(list(own.values())) for suite, own in ways.items()}
    left = tuple(
        ExcludedEvaluation(suite, run, _describe_settings_difference(way, usual[suite]))
        for suite, own in ways.items()
        for run, way in own.items()
        if way != usual[suite]
    )
    out = {(one.suite, one.run) for one in left}
    kept = {
        run: [one for one in own if (one.suite, run) not in out] for run, own in evaluations.items()
    }
    return kept, left


def _get_evaluation_settings(evaluation: EvaluationRecord, seed: int) -> Mapping[str, Any]:
    """Returns the recorded settings of an evaluation; empty where none are recorded.

    For the experiment's own suite, the run's seed counts as the same setting in every run.
    """
    suite = (evaluation.payload or {}).get("suite")
    if suite is None:
        return {}
    one = suite["sets"].get(evaluation.suite.rpartition("/")[2], {})
    own = suite["name"].partition(".")[0] == OWN_SUITE and suite["seed"] == seed
    return {
        "problems": one.get("problems") or suite["problems"],
        "samples": suite["samples"],
        "greedy": suite["greedy"],
        "seed": "the run's" if own else suite["seed"],
        "set": one.get("set", {}),
    }


def _find_usual_settings(ways: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    places = Counter(ways.index(way) for way in ways)
    return ways[places.most_common(1)[0][0]]


def _describe_settings_difference(way: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    if not way or not usual:
        return "its settings are not recorded" if usual else "the others' settings are not recorded"
    return ", ".join(f"{n} {way[n]} instead of {usual[n]}" for n in usual if way[n] != usual[n])
