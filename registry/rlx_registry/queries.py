"""Queries for pages and lists: many runs at once, downsampled curves, and pages of rollouts.

Every query is an index seek or an index range and loads no bulky columns by default, so the cost of
a page hardly depends on the size of the registry: the payload of an evaluation, which has every
answer to it, would cost seconds for a thousand runs.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from sqlalchemy import ColumnElement, Connection, Row, and_, func, or_, select, true

from rlx_registry import models
from rlx_registry.database import Database, format_run_id, get_run_keys
from rlx_registry.records import (
    STATUSES,
    RolloutIndex,
    RunRecord,
    RunRow,
    Status,
)
from rlx_registry.results import INDEX_FIELDS, build_index_record
from rlx_registry.states import has_status, require_statuses

EXACT = 600
"""Largest number of steps for which a curve is returned without downsampling."""

IDLE_STEPS = 5
"""Consecutive steps without a gradient after which a run and its pages say so."""
GRADIENT, SILENT_GROUPS = "train/grad_norm", "rollout/zero_signal_"
"""The metric of the gradient's norm, and the prefix of those of the share of groups without signal,
by kind of turn."""

Curve = list[tuple[int, float]]
"""(step, value), steps ascending."""

_ROW = tuple(RunRow.__dataclass_fields__)


class RunFilter(TypedDict, total=False):
    """Conditions that a run must meet, all of them; None and an empty set of statuses are none.

    Attributes:
        statuses: effective ones.
        created_from: earliest time of its submission, inclusive.
        created_before: latest, exclusive.
    """

    name: str | None
    group: str | None
    digest: str | None
    statuses: Collection[str]
    created_from: float | None
    created_before: float | None


@dataclass(frozen=True, slots=True)
class EvaluationFigures:
    """An evaluation in a list of runs; see `EvaluationRecord`."""

    step: int
    label: str
    suite: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """A filter for the prompts of a step: at least one row must match every condition.

    Attributes:
        low, high: inclusive bounds of the row's reward; absent rewards match neither.
        turn: kind of turn.
        failed: only rows on which a parser or scorer failed.
        no_signal: only rows of groups in which every advantage is 0.
        text: substring of the preview or of the problem's id, ignoring case.
        problem: id of the problem.
    """

    low: float | None = None
    high: float | None = None
    turn: str | None = None
    failed: bool = False
    no_signal: bool = False
    text: str | None = None
    problem: str | None = None


class Queries:
    """Reads lists of runs, and pages about one, with one query for all of them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # Runs --------------------------------------------------------------------------------------

    def run_rows(self, recorded: Collection[str] = STATUSES) -> list[RunRow]:
        """Returns the runs with one of some recorded statuses, without their specs, newest
        first."""
        c = models.run.c
        query = select(*(c[name] for name in _ROW)).order_by(c.id.desc())
        query = query.where(c.status.in_(sorted(recorded)))
        with self._database.open_reader() as connection:
            return [
                RunRow(**{**row._mapping, "id": format_run_id(row.id)})
                for row in connection.execute(query)
            ]

    def last_values(
        self, ids: Collection[str], names: Sequence[str]
    ) -> dict[str, dict[str, tuple[int, float]]]:
        """Returns `{run: {metric: (step, value)}}` with each metric's newest value."""
        run, key, c = models.run.c, models.metric_key.c, models.metric.c
        own = and_(c.run_id == run.id, c.key_id == key.id)
        # Two seeks per pair; in SQLite, a join with the newest step would scan whole runs.
        step, value = (
            select(column).where(own).order_by(c.step.desc()).limit(1).scalar_subquery()
            for column in (c.step, c.value)
        )
        query = select(run.id, key.name, step.label("step"), value.label("value"))
        query = query.join_from(models.run, models.metric_key, true())
        found: dict[str, dict[str, tuple[int, float]]] = {one: {} for one in ids}
        with self._database.open_reader() as connection:
            called = get_run_keys(connection, ids)
            query = query.where(run.id.in_(list(called)), key.name.in_(list(names)))
            for of, name, at, newest in connection.execute(query):
                if at is not None:
                    found[called[of]][name] = (at, newest)
        return found

    def evaluation_figures(self, ids: Collection[str]) -> dict[str, list[EvaluationFigures]]:
        """Returns the figures of the evaluations of some runs, by step."""
        c = models.evaluation.c
        # Not their time: it lies behind the payload, which SQLite would have to read through.
        query = select(c.run_id, c.step, c.label, c.suite, c.metrics).order_by(c.run_id, c.step)
        found: dict[str, list[EvaluationFigures]] = {one: [] for one in ids}
        with self._database.open_reader() as connection:
            called = get_run_keys(connection, ids)
            for key, *fields in connection.execute(query.where(c.run_id.in_(list(called)))):
                found[called[key]].append(EvaluationFigures(*fields))
        return found

    def groups(self, ids: Collection[str]) -> dict[str, list[str]]:
        """Returns the groups of some runs, in the order in which the runs joined them."""
        c = models.grouped.c
        query = select(c.run_id, c.name).order_by(c.at, c.name)
        found: dict[str, list[str]] = {one: [] for one in ids}
        with self._database.open_reader() as connection:
            called = get_run_keys(connection, ids)
            for key, name in connection.execute(query.where(c.run_id.in_(list(called)))):
                found[called[key]].append(name)
        return found

    def failures(self, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Returns the payload of the last event "failed" of those of some runs that have one."""
        c = models.event.c
        query = select(c.run_id, c.payload).where(c.kind == "failed", c.payload.is_not(None))
        with self._database.open_reader() as connection:
            called = get_run_keys(connection, ids)
            rows = connection.execute(query.where(c.run_id.in_(list(called))).order_by(c.id))
            return {called[key]: payload for key, payload in rows}

    def idle_steps(self, ids: Collection[str]) -> dict[str, int]:
        """Returns how many of each run's latest steps, without a gap, gave no gradient."""
        with self._database.open_reader() as connection:
            called = get_run_keys(connection, ids)
            counts = _count_idle_steps(connection, called)
            return {called[key]: count for key, count in counts.items()}

    def metric_names(self, run_id: str) -> list[str]:
        """Returns the names of a run's metrics, sorted."""
        key_c, c = models.metric_key.c, models.metric.c
        with self._database.open_run_reader(run_id) as (connection, key):
            has = select(1).where(c.run_id == key, c.key_id == key_c.id).exists()
            return sorted(connection.scalars(select(key_c.name).where(has)))

    # Curves ------------------------------------------------------------------------------------

    def curves(self, run_id: str, names: Sequence[str], points: int = 300) -> dict[str, Curve]:
        """Returns `{metric: [(step, value), ...]}` with at most about `2 * points` points each.

        Curves of runs with more than `EXACT` steps are downsampled: every bucket of steps keeps its
        lowest and its highest value at their own steps, and the newest value is always kept.
        """
        c = models.metric.c
        with self._database.open_run_reader(run_id) as (connection, key):
            keys = self._metric_keys(connection, names)
            last = connection.scalar(select(models.run.c.step).where(models.run.c.id == key)) or 0
            found = {}
            for name, key_id in keys.items():
                of_one = and_(c.run_id == key, c.key_id == key_id)
                found[name] = (
                    _load_exact_curve(connection, of_one)
                    if last <= EXACT
                    else _load_extremes_curve(connection, of_one, -(-last // points))
                )
            return {name: curve for name in names if (curve := found.get(name))}

    def step_times(
        self, run_id: str, name: str, last: int | None = None
    ) -> list[tuple[int, float]]:
        """Returns `(step, at)` of a metric, steps ascending; only the `last` ones if given."""
        c = models.metric.c
        with self._database.open_run_reader(run_id) as (connection, key):
            key_id = self._metric_keys(connection, [name]).get(name, -1)
            query = select(c.step, c.at).where(c.run_id == key, c.key_id == key_id)
            rows = connection.execute(query.order_by(c.step.desc()).limit(last))
            return [(step, at) for step, at in rows][::-1]

    def last_seq(self, run_id: str) -> int:
        """Returns the largest `seq` of a run's metrics; see `RunResults.metric_rows_after`."""
        c = models.metric.c
        with self._database.open_run_reader(run_id) as (connection, key):
            return int(connection.scalar(select(func.max(c.seq)).where(c.run_id == key)) or 0)

    @staticmethod
    def _metric_keys(connection: Connection, names: Iterable[str]) -> dict[str, int]:
        c = models.metric_key.c
        rows = connection.execute(select(c.name, c.id).where(c.name.in_(list(names))))
        return {row.name: row.id for row in rows}

    # Events and evaluations --------------------------------------------------------------------

    def count_events(self, run_id: str) -> int:
        """Returns the number of a run's events."""
        c = models.event.c
        with self._database.open_run_reader(run_id) as (connection, key):
            query = select(func.count()).select_from(models.event).where(c.run_id == key)
            return int(connection.scalar(query) or 0)

    # Rollouts ----------------------------------------------------------------------------------

    def matching_trees(self, run_id: str, step: int, query: RolloutQuery) -> list[int]:
        """Returns the trees of a step that match a query, ascending."""
        c = models.rollout.c
        with self._database.open_run_reader(run_id) as (connection, key):
            here = and_(c.run_id == key, c.step == step)
            wanted = select(c.tree).where(here, *_build_rollout_conditions(query, here)).distinct()
            return sorted(connection.scalars(wanted))

    def tree_rows(self, run_id: str, step: int, trees: Collection[int]) -> list[RolloutIndex]:
        """Returns the index rows of some trees of a step, by row number."""
        c = models.rollout.c
        query = select(*(c[name] for name in INDEX_FIELDS)).order_by(c.row)
        query = query.where(c.step == step, c.tree.in_(list(trees)))
        with self._database.open_run_reader(run_id) as (connection, key):
            return [build_index_record(r) for r in connection.execute(query.where(c.run_id == key))]

    def tree_of_row(self, run_id: str, step: int, row: int) -> int | None:
        """Returns the tree of a row of a step; None if there is no such row."""
        c = models.rollout.c
        with self._database.open_run_reader(run_id) as (connection, key):
            query = select(c.tree).where(c.run_id == key, c.step == step, c.row == row)
            return connection.scalar(query)

    def problem_steps(self, run_id: str, problem_id: str) -> list[int]:
        """Returns the steps in which a problem was sampled, ascending."""
        c = models.rollout.c
        with self._database.open_run_reader(run_id) as (connection, key):
            query = select(c.step).where(c.run_id == key, c.problem_id == problem_id)
            return sorted(connection.scalars(query.distinct()))

    def largest_advantages(self, run_id: str, step: int) -> dict[str, float]:
        """Returns the largest |advantage| of a step, by kind of turn."""
        c = models.rollout.c
        query = select(c.turn, func.max(func.abs(c.advantage))).group_by(c.turn)
        with self._database.open_run_reader(run_id) as (connection, key):
            rows = connection.execute(query.where(c.run_id == key, c.step == step))
            return {turn: float(value) for turn, value in rows}

    # The registry itself -----------------------------------------------------------------------

    def statuses(self) -> dict[Status, int]:
        """Returns the number of runs per effective status, without empty ones."""
        c, now = models.run.c, time.time()
        plain = select(c.status, func.count().label("n")).group_by(c.status)
        with self._database.open_reader() as connection:
            is_lost = has_status(connection, ["lost"], now)
            lost = select(c.status, func.count()).where(is_lost, c.status != "lost")
            found: dict[str, int] = {r.status: r.n for r in connection.execute(plain)}
            for status, count in connection.execute(lost.group_by(c.status)):
                found[status] -= count
                found["lost"] = found.get("lost", 0) + count
        return {status: n for status, n in sorted(found.items()) if n}  # type: ignore[misc]


def _load_exact_curve(connection: Connection, of_one: ColumnElement[bool]) -> Curve:
    c = models.metric.c
    query = select(c.step, c.value).where(of_one).order_by(c.step)
    return [(step, value) for step, value in connection.execute(query)]


def _load_extremes_curve(connection: Connection, of_one: ColumnElement[bool], width: int) -> Curve:
    """Every bucket's lowest and highest value, at the first step that has it."""
    c = models.metric.c
    stretch = c.step // width

    def rank_rows(*order: Any) -> ColumnElement[int]:
        return func.row_number().over(partition_by=stretch, order_by=order)

    ranked = select(
        c.step,
        c.value,
        rank_rows(c.value, c.step).label("low"),
        rank_rows(c.value.desc(), c.step).label("high"),
        func.max(c.step).over().label("newest"),
    )
    r = ranked.where(of_one).subquery().c
    kept = or_(r.low == 1, r.high == 1, r.step == r.newest)
    rows = connection.execute(select(r.step, r.value).where(kept).order_by(r.step))
    return [(step, value) for step, value in rows]


def _build_rollout_conditions(
    query: RolloutQuery, here: ColumnElement[bool]
) -> Iterable[ColumnElement[bool]]:
    c = models.rollout.c
    if query.low is not None:
        yield c.reward >= query.low
    if query.high is not None:
        yield c.reward <= query.high
    if query.turn is not None:
        yield c.turn == query.turn
    if query.failed:
        yield c.failed.is_not(None)
    if query.problem is not None:
        yield c.problem_id == query.problem
    if query.text:
        contains = [x.icontains(query.text, autoescape=True) for x in (c.preview, c.problem_id)]
        yield or_(*contains)
    if query.no_signal:
        silent = select(c.group).where(here).group_by(c.group)
        yield c.group.in_(silent.having(func.max(func.abs(c.advantage)) == 0))


def build_run_conditions(
    connection: Connection, wanted: RunFilter
) -> Iterator[ColumnElement[bool]]:
    """Yields the conditions of a filter, in SQL.

    Raises:
        ValueError: a status is unknown.
    """
    c = models.run.c
    if (name := wanted.get("name")) is not None:
        yield c.name == name
    if (digest := wanted.get("digest")) is not None:
        yield c.digest == digest
    if (group := wanted.get("group")) is not None:
        own = models.grouped.c
        yield c.id.in_(select(own.run_id).where(own.name == group))
    if statuses := wanted.get("statuses"):
        require_statuses(statuses)
        yield has_status(connection, statuses, time.time())
    if (earliest := wanted.get("created_from")) is not None:
        yield c.created >= earliest
    if (latest := wanted.get("created_before")) is not None:
        yield c.created < latest


def build_run_record(row: Row[Any]) -> RunRecord:
    """Builds the record of a run from its row."""
    fields = dict(row._mapping)
    return RunRecord(**{**fields, "id": format_run_id(fields["id"])})


def is_idle(idle: int, steps: int) -> bool:
    """Whether a run that took so many steps gave no gradient for too long, or from its start.

    Args:
        idle: how many of its latest steps gave none.
        steps: how many it took.
    """
    return steps > 0 and min(IDLE_STEPS, steps) <= idle


def _count_idle_steps(connection: Connection, keys: Collection[int]) -> dict[int, int]:
    """Returns how many of each run's latest steps, without a gap, gave no gradient.

    A step gave one if the norm of its gradient is not 0, or a group has a signal: the policy then
    waits for its critic. A step without metrics could not be scored.

    Args:
        connection: to the registry.
        keys: of the runs.
    """
    run, key, c = models.run.c, models.metric_key.c, models.metric.c
    is_share = key.name.startswith(SILENT_GROUPS, autoescape=True)
    own = and_(c.run_id == run.id, c.key_id == key.id)
    learned = or_(and_(key.name == GRADIENT, c.value != 0), and_(is_share, c.value < 1))
    # Seeks by run and metric; a join would scan every step of every run.
    first, newest, last = (
        select(c.step).where(own, *condition).order_by(order).limit(1).scalar_subquery()
        for order, condition in ((c.step, ()), (c.step.desc(), ()), (c.step.desc(), (learned,)))
    )
    query = select(run.id, run.step, is_share, first, newest, last)
    query = query.join_from(models.run, models.metric_key, true())
    query = query.where(run.id.in_(list(keys)), or_(key.name == GRADIENT, is_share))
    by_run: dict[int, list[tuple[int | None, bool, int, int, int | None]]] = {k: [] for k in keys}
    for one, *figures in connection.execute(query):
        by_run[one].append(tuple(figures))
    return {one: _count_since_signal(metrics) for one, metrics in by_run.items()}


def _count_since_signal(metrics: Collection[tuple[int | None, bool, int, int, int | None]]) -> int:
    """Counts the steps after the last one with a gradient.

    Args:
        metrics: of one run: its step, and of each metric whether it is a share, its first and
            newest step, and the last that shows a gradient.
    """
    shares = [(first, newest) for _, is_share, first, newest, _ in metrics if is_share and newest]
    if not shares:
        return 0
    newest = max(step or 0 for step, *_ in metrics)
    newest = max(newest, *(later for _, later in shares))
    seen = [last for *_, last in metrics if last is not None]
    return newest - (max(seen) if seen else min(earlier for earlier, _ in shares) - 1)
