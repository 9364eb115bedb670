"""The columns of the list of runs, which a reader chooses and orders."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Column", "ColumnError", "find_varied_paths", "list_offered_columns", "select_columns"]

FIELDS = {
    "seed": "Seed",
    "status": "Status",
    "step": "Step",
    "accuracy": "Accuracy",
    "brier": "Brier",
    "ece": "ECE",
    "headline": "Headline",
    "tags": "Tags",
    "note": "Note",
    "host": "Machine",
    "duration": "Duration",
    "age": "Age",
}
"""Columns that every run has, with their titles."""
USUAL = ("seed", "status", "step", "accuracy", "brier", "ece", "headline")
NUMBERS = ("seed", "step", "accuracy", "brier", "ece", "duration", "age")
NOT_VARIED = frozenset({"name", "seed", "runner", "tracking"})
"""Sections of an experiment that do not change what it computes."""
MOST_VARIED = 6
"""Maximum number of values in which the experiments of a sweep differ."""

Kind = Literal["field", "config", "metric"]


class ColumnError(ValueError):
    """There is no such column; the message says which there are."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        id: "seed", "config:estimator.eps", "metric:train/loss".
        kind: what it shows: a field of the run, a config value, or a metric's newest value.
        name: the field, the path of the value, or the metric.
        title: its heading.
    """

    id: str
    kind: Kind
    name: str
    title: str

    @property
    def is_number(self) -> bool:
        """Whether its values are aligned as numbers."""
        return self.kind == "metric" or self.name in NUMBERS


def select_columns(
    asked: Sequence[str],
    varied: Sequence[str] = (),
    has_tags: bool = False,
    has_notes: bool = False,
) -> list[Column]:
    """The columns asked for in their order; or the usual ones, with the values that a sweep varies.

    Raises:
        ColumnError: there is no such column.
    """
    if not asked:
        noted = [name for name, has in (("tags", has_tags), ("note", has_notes)) if has]
        asked = [*USUAL, *(f"config:{path}" for path in varied), *noted, "age"]
    return [_build_column(one) for one in dict.fromkeys(asked)]


def list_offered_columns(chosen: Sequence[Column], varied: Sequence[str]) -> list[Column]:
    """The chosen columns, then those that a reader can add by a tick."""
    others = [*FIELDS, *(f"config:{path}" for path in varied)]
    return list(dict.fromkeys([*chosen, *(_build_column(one) for one in others)]))


def find_varied_paths(experiments: Iterable[tuple[Iterable[str], Mapping[str, Any]]]) -> list[str]:
    """The config values that a sweep varies: in which experiments with a common label differ.

    Experiments that differ in more than `MOST_VARIED` values, or of which some lack a value, are no
    sweep in it, but different recipes.

    Args:
        experiments: for each its labels (name, groups), and its values by path.
    """
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for labels, values in experiments:
        for label in labels:
            alike.setdefault(label, []).append(values)
    found = [_find_differing_paths(several) for several in alike.values()]
    return list(
        dict.fromkeys(path for paths in found if len(paths) <= MOST_VARIED for path in paths)
    )


def _find_differing_paths(experiments: Sequence[Mapping[str, Any]]) -> list[str]:
    first = experiments[0]
    return [
        path
        for path, value in first.items()
        if path.partition(".")[0] not in NOT_VARIED
        and all(path in values for values in experiments)
        and any(values[path] != value for values in experiments)
    ]


def _build_column(asked: str) -> Column:
    kind, colon, name = asked.partition(":")
    if asked in FIELDS:
        return Column(asked, "field", asked, FIELDS[asked])
    if colon and name and kind in ("config", "metric"):
        return Column(asked, kind, name, name)  # type: ignore[arg-type]
    raise ColumnError(
        f"no column {asked!r}: use config:PATH, metric:NAME, or one of {', '.join(FIELDS)}"
    )
