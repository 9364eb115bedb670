"""Options that select runs: by name, group, status, age and any value of their experiments."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, TypeVar

import click

from rlx.errors import SpecError
from rlx.launch import list_group_runs
from rlx.text import escape_unprintable
from rlx_registry import STATUSES, Registry, RunFilter, RunRecord

__all__ = ["filter_options", "select_runs"]

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _parse_age(text: str) -> float:
    """Returns the seconds of an age such as `30d`."""
    match = re.fullmatch(r"([0-9]{1,6})(s|min|h|d|w)", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no age: write 90min, 12h, 30d or 2w")
    return float(match[1]) * _UNITS[match[2]]


_OPTIONS = (
    click.option("--name", help="Only runs of this experiment."),
    click.option("--group", metavar="NAME", help="Only runs of this group."),
    click.option(
        "--status", type=click.Choice(STATUSES), multiple=True, help="Only runs with this status."
    ),
    click.option("--since", type=_parse_age, metavar="12h", help="Only runs submitted since then."),
    click.option(
        "--older-than", type=_parse_age, metavar="30d", help="Only runs submitted longer ago."
    ),
    click.option(
        "--where",
        multiple=True,
        metavar="PATH=VALUE",
        help="Only runs whose experiment has this value; can be repeated.",
    ),
)


def filter_options(command: Command) -> Command:
    """Adds the options that `select_runs` takes."""
    return reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), command)


def select_runs(
    registry: Registry,
    *,
    name: str | None = None,
    group: str | None = None,
    status: Sequence[str] = (),
    since: float | None = None,
    older_than: float | None = None,
    where: Sequence[str] = (),
    limit: int | None = None,
) -> tuple[list[RunRecord], int]:
    """Returns the runs that meet every condition, newest first, and how many `limit` leaves out.

    Raises:
        SpecError: there is no such group, or no run has such a value.
    """
    if group is not None:
        list_group_runs(registry, group)
    now = time.time()
    wanted = RunFilter(
        name=name,
        group=group,
        statuses=status,
        created_from=None if since is None else now - since,
        created_before=None if older_than is None else now - older_than,
    )
    found = registry.lists.select(wanted, None if where else limit)
    for condition in where:
        found = list(_select_by_value(found, condition))
    count = len(found) if where or limit is None else registry.lists.count(wanted)
    return found[:limit], count - len(found[:limit])


def _select_by_value(runs: Sequence[RunRecord], condition: str) -> Iterator[RunRecord]:
    from rlx.spec.reading import did_you_mean, list_leaf_values, parse_yaml_document

    path, equals, text = condition.partition("=")
    if not equals or not path:
        raise SpecError(f"--where {escape_unprintable(condition)}: write PATH=VALUE")
    wanted = parse_yaml_document(text, "--where").tree
    values = {run.id: dict(list_leaf_values(run.settings)) for run in runs}
    if runs and not any(path in own for own in values.values()):
        near = did_you_mean(path, {known: None for own in values.values() for known in own})
        hint = f"; did you mean '{near}'?" if near else ""
        raise SpecError(f"--where: no run has a value {escape_unprintable(path)!r}{hint}")
    return (run for run in runs if path in values[run.id] and values[run.id][path] == wanted)
