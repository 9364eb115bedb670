"""The filter of the list of runs: words about a run, its notes, and its config values."""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx_registry import Registry, RunNote, RunRow

__all__ = ["RunLabels", "find_matching_runs", "list_config_values"]

CONDITION = re.compile(r"([^:<>=]+)(:|<=|>=|<|>|=)(.*)")
ORDERS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class RunLabels:
    """What people call a run: its groups, its note, its tags."""

    groups: Sequence[str] = ()
    note: RunNote = field(default_factory=RunNote)


def find_matching_runs(
    registry: Registry, rows: Sequence[RunRow], labels: Mapping[str, RunLabels], text: str
) -> list[RunRow]:
    """The runs that every word of a filter matches.

    A word occurs in a run's id, name, digest, status, host, groups, tags or note; or is a condition
    such as `status:running`, `seed:3`, `tag:paper`, or of a config value: `estimator.eps:1e-6`,
    `eps>0`. The path of a config value may be given by its last parts.
    """
    words = text.lower().split()
    specs: Mapping[str, Mapping[str, Any]] = {}
    if any(CONDITION.fullmatch(word) for word in words):
        found = registry.queries.specs({row.digest for row in rows})
        specs = {digest: dict(list_config_values(spec)) for digest, spec in found.items()}
    return [
        row
        for row in rows
        if _matches_words(row, labels.get(row.id, RunLabels()), specs.get(row.digest, {}), words)
    ]


def list_config_values(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every value of an experiment by its dotted path; items of a list by their number."""
    if isinstance(value, Mapping) and value:
        inside = list(value.items())
    elif isinstance(value, list) and value:
        inside = list(enumerate(value))
    else:
        return [(path, value)]
    return [
        leaf for name, v in inside for leaf in list_config_values(v, f"{path}.{name}".lstrip("."))
    ]


def _matches_words(
    row: RunRow, labels: RunLabels, config: Mapping[str, Any], words: Sequence[str]
) -> bool:
    status = row.effective_status
    known: dict[str, Sequence[str]] = {
        "status": [status],
        "seed": [str(row.seed)],
        "name": [row.name],
        "group": labels.groups,
        "tag": labels.note.tags,
    }
    texts = (row.id, row.name, row.digest, status, row.host or "", *labels.groups)
    everything = " ".join((*texts, *labels.note.tags, labels.note.note)).lower()
    for word in words:
        key, _, value = word.partition(":")
        if key != word and key in known:
            if value not in (one.lower() for one in known[key]):
                return False
        elif word not in everything and not _matches_config(word, config):
            return False
    return True


def _matches_config(word: str, config: Mapping[str, Any]) -> bool:
    condition = CONDITION.fullmatch(word)
    if condition is None:
        return False
    key, sign, text = condition.groups()
    return any(
        _fulfils(value, sign, text)
        for path, value in config.items()
        if path.lower() == key or path.lower().endswith(f".{key}")
    )


def _fulfils(value: Any, sign: str, text: str) -> bool:
    number, wanted = _parse_number(value), _parse_number(text)
    if number is not None and wanted is not None:
        return ORDERS[sign](number, wanted) if sign in ORDERS else number == wanted
    plain = value if isinstance(value, str) else json.dumps(value)
    return sign not in ORDERS and plain.lower() == text


def _parse_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number
