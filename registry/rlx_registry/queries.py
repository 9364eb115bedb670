"""Queries for pages and lists: many runs at once, downsampled curves, and pages of rollouts.

Every query is an index seek or an index range and loads no bulky columns, so the cost of a page
hardly depends on the size of the registry: the payload of an evaluation, which has every answer to
it, would cost seconds for a thousand runs.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    and_,
    func,
    or_,
    select,
    true,
)

from rlx_registry import models
from rlx_registry.database import Database, get_run_keys, select_fields
from rlx_registry.records import STATUSES, RunRow, Status
from rlx_registry.states import (
    build_run,
    find_lost_runs,
    has_status,
    require_statuses,
)

EXACT = 600
"""Largest number of steps for which a curve is returned without downsampling."""

IDLE_STEPS = 5
"""Consecutive steps without a gradient after which a run and its pages say so."""
GRADIENT, SILENT_GROUPS = "train/grad_norm", "rollout/zero_signal_"
"""The metric of the gradient's norm, and the prefix of those of the share of groups without signal,
by kind of turn."""

Curve = list[tuple[int, float]]
"""(step, value), steps ascending."""


class RunFilter(TypedDict, total=False):
    """Conditions that a run must meet, all of them; None and an empty set of (effective) statuses
    are none."""

    name: str | None
    group: str | None
    digest: str | None
    statuses: Collection[str]
    created_before: float | None


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """A filter for the prompts of a step: at least one row must match every condition.

    Attributes:
        low, high: inclusive bounds of the row's reward; absent rewards match neither.
        turn: kind of turn.
        failed: only rows on which a parser or scorer failed.
        no_signal: only rows of groups in which every advantage is 0.
        text: substring of the preview or of the problem's id, ignoring case.
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
        """Returns the runs with some recorded statuses, without their specs, newest first."""
        c = models.run.c
        query = select_fields(models.run, RunRow).order_by(c.id.desc())
        query = query.where(c.status.in_(sorted(recorded)))
        with self._database.open_reader() as connection:
            return [build_run(RunRow, row) for row in connection.execute(query)]

    def _read_rows(
        self, ids: Collection[str], query: Select[Any], column: ColumnElement[int]
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yields the rows of a query that are of some runs, as the run's id and the columns after
        the first, which is the run's key."""
        with self._database.open_reader() as connection:
            called = get_run_keys(connection, ids)
            for key, *fields in connection.execute(query.where(column.in_(list(called)))):
                yield called[key], tuple(fields)

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
        query = query.where(key.name.in_(list(names)))
        found: dict[str, dict[str, tuple[int, float]]] = {one: {} for one in ids}
        for of, (name, at, newest) in self._read_rows(ids, query, run.id):
            if at is not None:
                found[of][name] = (at, newest)
        return found

    def evaluation_figures(
        self, ids: Collection[str]
    ) -> dict[str, list[tuple[str, str, Mapping[str, Any]]]]:
        """Returns suite, label and metrics of the evaluations of some runs, by step."""
        c = models.evaluation.c
        # Not their time: it lies behind the payload, which SQLite would have to read through.
        query = select(c.run_id, c.suite, c.label, c.metrics).order_by(c.run_id, c.step)
        found: dict[str, list[Any]] = {one: [] for one in ids}
        for of, figures in self._read_rows(ids, query, c.run_id):
            found[of].append(figures)
        return found

    def groups(self, ids: Collection[str]) -> dict[str, list[str]]:
        """Returns the groups of some runs, in the order in which the runs joined them."""
        c = models.grouped.c
        query = select(c.run_id, c.name).order_by(c.at, c.name)
        found: dict[str, list[str]] = {one: [] for one in ids}
        for of, (name,) in self._read_rows(ids, query, c.run_id):
            found[of].append(name)
        return found

    def failures(self, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Returns the payload of the last event "failed" of those of some runs that have one."""
        c = models.event.c
        query = select(c.run_id, c.payload).where(c.kind == "failed", c.payload.is_not(None))
        rows = self._read_rows(ids, query.order_by(c.id), c.run_id)
        return {of: payload for of, (payload,) in rows}

    def idle_steps(self, ids: Collection[str]) -> dict[str, int]:
        """Returns how many of each run's latest steps, without a gap, gave no gradient.

        A step gave one if the norm of its gradient is not 0, or a group has a signal: the policy
        then waits for its critic. A step without metrics could not be scored.
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
        query = select(
            run.id, run.step, is_share, first.label("first"), newest.label("newest"), last
        )
        query = query.join_from(models.run, models.metric_key, true())
        query = query.where(or_(key.name == GRADIENT, is_share))
        found: dict[str, list[tuple[Any, ...]]] = {one: [] for one in ids}
        for of, figures in self._read_rows(ids, query, run.id):
            found[of].append(figures)
        counts = dict.fromkeys(ids, 0)
        for one, figures_of_one in found.items():
            shares = [of for of in figures_of_one if of[1] and of[3]]
            if shares:
                latest = max(max(step or 0, newest) for step, _, _, newest, _ in shares)
                signals = [last for *_, last in figures_of_one if last is not None]
                counts[one] = latest - max(signals, default=min(of[2] for of in shares) - 1)
        return counts

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
        c, curves = models.metric.c, dict[str, Curve]()
        with self._database.open_run_reader(run_id) as (connection, key):
            last = connection.scalar(select(models.run.c.step).where(models.run.c.id == key)) or 0
            for name in names:
                own = and_(c.run_id == key, c.key_id == _select_metric_key(name))
                whole = select(c.step, c.value).where(own).order_by(c.step)
                query = whole if last <= EXACT else _select_extremes(own, -(-last // points))
                if curve := [(step, value) for step, value in connection.execute(query)]:
                    curves[name] = curve
        return curves

    def step_times(
        self, run_id: str, name: str, last: int | None = None
    ) -> list[tuple[int, float]]:
        """Returns `(step, at)` of a metric, steps ascending; only the `last` ones if given."""
        c = models.metric.c
        with self._database.open_run_reader(run_id) as (connection, key):
            query = select(c.step, c.at).where(
                c.run_id == key, c.key_id == _select_metric_key(name)
            )
            rows = connection.execute(query.order_by(c.step.desc()).limit(last))
            return [(step, at) for step, at in rows][::-1]

    def last_seq(self, run_id: str) -> int:
        """Returns the largest `seq` of a run's metrics; see `RunResults.metric_rows_after`."""
        c = models.metric.c
        with self._database.open_run_reader(run_id) as (connection, key):
            return int(connection.scalar(select(func.max(c.seq)).where(c.run_id == key)) or 0)

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
        c = models.run.c
        with self._database.open_reader() as connection:
            found = Counter[Status]()
            for status, count in connection.execute(
                select(c.status, func.count()).group_by(c.status)
            ):
                found[status] = count
            for status in find_lost_runs(connection).values():
                found[status] -= 1
                found["lost"] += 1
        return {status: n for status, n in sorted(found.items()) if n}


def _select_metric_key(name: str) -> ScalarSelect[int]:
    return select(models.metric_key.c.id).where(models.metric_key.c.name == name).scalar_subquery()


def _select_extremes(own: ColumnElement[bool], width: int) -> Select[tuple[int, float]]:
    """Selects every bucket's lowest and highest value, at the first step that has it."""
    c = models.metric.c

    def rank_rows(*order: Any) -> ColumnElement[int]:
        return func.row_number().over(partition_by=c.step // width, order_by=order)

    ranked = select(
        c.step,
        c.value,
        rank_rows(c.value, c.step).label("low"),
        rank_rows(c.value.desc(), c.step).label("high"),
        func.max(c.step).over().label("newest"),
    )
    r = ranked.where(own).subquery().c
    kept = or_(r.low == 1, r.high == 1, r.step == r.newest)
    return select(r.step, r.value).where(kept).order_by(r.step)


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
    """Yields the conditions of a filter, in SQL. ValueError if a status is unknown."""
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
        yield has_status(connection, statuses)
    if (latest := wanted.get("created_before")) is not None:
        yield c.created < latest


def is_idle(idle: int, steps: int) -> bool:
    """Whether the latest `idle` of so many steps, without a gradient, are too many, or all."""
    return steps > 0 and min(IDLE_STEPS, steps) <= idle
