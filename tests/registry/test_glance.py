"""Reading for pages: what many queries would say, in one."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from submissions import index_row, submit

from rlx_registry import NotFoundError, Registry, RolloutQuery
from rlx_registry.queries import EXACT

NUMBERS = itertools.count()
CURVES = {"a": [(1, 0.5), (4, 0.25)], "b": [(2, 1.0)]}


@pytest.fixture
def registry(url):
    with Registry.open(url) as opened:
        for seed in range(3):
            submit(opened, seed=seed)
        yield opened


def put(registry, run, curves):
    for name, points in curves.items():
        for step, value in points:
            registry.results.add_metrics(run, step, {name: value}, at=1000.0 + step)


def test_rows_are_the_runs_without_their_specs(registry):
    registry.transition("r-0002", ["submitted"], "running")
    rows = registry.queries.run_rows()
    assert [row.id for row in rows] == ["r-0003", "r-0002", "r-0001"]
    for row in rows:
        whole = registry.run(row.id)
        fields = [f.name for f in dataclasses.fields(row)]
        assert [getattr(row, f) for f in fields] == [getattr(whole, f) for f in fields]
        assert row.effective_status == whole.effective_status
    with pytest.raises(NotFoundError):
        registry.queries.last_values(["r-0009"], ["a"])
    assert [row.id for row in registry.queries.run_rows(["running"])] == ["r-0002"]


def test_last_values_are_the_ends_of_the_curves(registry):
    put(registry, "r-0001", CURVES)
    put(registry, "r-0002", {"a": [(7, -1.0)]})
    found = registry.queries.last_values(["r-0001", "r-0002", "r-0003"], ["a", "b", "none"])
    assert found == {
        "r-0001": {"a": (4, 0.25), "b": (2, 1.0)},
        "r-0002": {"a": (7, -1.0)},
        "r-0003": {},
    }
    assert registry.queries.metric_names("r-0001") == ["a", "b"]
    assert registry.queries.metric_names("r-0003") == []


def test_short_curves_are_exact_and_keep_the_order_that_was_asked_for(registry):
    put(registry, "r-0001", CURVES)
    assert list(registry.queries.curves("r-0001", ["b", "none", "a"]).items()) == [
        ("b", CURVES["b"]),
        ("a", CURVES["a"]),
    ]
    assert registry.queries.step_times("r-0001", "a") == [(1, 1001.0), (4, 1004.0)]
    assert registry.queries.step_times("r-0001", "a", last=1) == [(4, 1004.0)]
    assert registry.queries.step_times("r-0001", "none") == []
    assert registry.queries.last_seq("r-0001") == 3
    assert registry.queries.last_seq("r-0002") == 0


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(-9, 9), min_size=30, max_size=60), points=st.integers(2, 12))
def test_long_curves_keep_every_stretch_s_extremes(registry, values, points):
    name, last = f"m{next(NUMBERS)}", EXACT + len(values)
    put(registry, "r-0001", {name: [(EXACT + i + 1, value) for i, value in enumerate(values)]})
    registry.update_run("r-0001", step=last)
    thin = registry.queries.curves("r-0001", [name], points)[name]
    assert len(thin) <= 2 * points + 3
    assert set(thin) <= set(registry.results.metrics("r-0001", [name])[name])
    steps = [step for step, _ in thin]
    assert steps == sorted(set(steps))
    assert steps[-1] == last
    shown = [value for _, value in thin]
    assert (min(shown), max(shown)) == (min(values), max(values))
    assert (
        registry.queries.curves("r-0001", [name], last)[name]
        == registry.results.metrics("r-0001", [name])[name]
    )


def test_the_newest_events_are_the_last_ones_in_order(registry):
    for number in range(5):
        registry.results.add_event("r-0001", "k", str(number))
        registry.results.add_event("r-0002", "k", "other")
    whole = registry.results.events("r-0001")
    assert [event.message for event in whole] == ["0", "1", "2", "3", "4"]
    assert registry.results.events("r-0001", limit=3) == whole[2:]
    assert registry.results.events("r-0001", limit=9) == whole
    assert registry.results.events("r-0001", whole[1].id, 1) == whole[4:]
    assert registry.results.events("r-0001", whole[4].id) == []
    assert registry.queries.count_events("r-0001") == 5
    assert registry.queries.count_events("r-0003") == 0


@pytest.mark.sqlite
def test_no_page_reads_a_large_table_beyond_what_it_shows(registry):
    """Of metrics what is asked for by run and metric, or in the order of writing; of rollouts a
    step, or a problem."""
    plans = []

    @event.listens_for(registry._reader, "before_cursor_execute")
    def explained(connection, cursor, statement, parameters, context, many):
        if statement.startswith("SELECT"):
            driver = cursor.connection
            plans.extend(driver.execute(f"EXPLAIN QUERY PLAN {statement}", parameters))

    run, query = "r-0001", RolloutQuery(low=0.0, text="x", no_signal=True)
    registry.queries.last_values(["r-0001", "r-0002"], ["a", "b"])
    registry.queries.metric_names(run)
    put(registry, run, CURVES)
    registry.queries.curves(run, ["a", "b"])
    registry.queries.step_times(run, "a", last=2)
    registry.queries.last_seq(run)
    registry.results.metric_rows_after(run, 0, 10)
    registry.results.events(run, limit=10)
    registry.queries.matching_trees(run, 1, query)
    registry.results.rollout_index(run, 1, [1, 2])
    registry.queries.problem_steps(run, "p")
    registry.queries.largest_advantages(run, 1)
    told = [plan[3] for plan in plans if re.search(r"\brlx_(metric|rollout|event)\b", plan[3])]
    assert len(told) >= 11
    for plan in told:
        assert plan.startswith("SEARCH"), plan
        assert "rlx_event" in plan or re.search(r"key_id|seq|step=|problem_id", plan), plan


def row(number, tree, **changes):
    scores = {"reward": number / 10, "advantage": 0.5 - number}
    return index_row(number, tree, **scores | changes)


INDEX = [
    row(0, 0),
    row(1, 0, group=5, turn="confidence", parent_row=0, advantage=0.0),
    row(2, 1, reward=None, failed="timeout"),
    row(3, 1, advantage=0.0, group=6),
    row(4, 2, advantage=0.0, preview="100% Äpfel"),
]


@pytest.mark.parametrize(
    ("query", "trees"),
    [
        ({}, [0, 1, 2]),
        ({"low": 0.3}, [1, 2]),
        ({"high": 0.0}, [0]),
        ({"low": 0.1, "high": 0.1}, [0]),
        ({"turn": "confidence"}, [0]),
        ({"failed": True}, [1]),
        ({"no_signal": True}, [0, 1, 2]),
        ({"no_signal": True, "turn": "answer"}, [1, 2]),
        ({"text": "text_4"}, []),
        ({"text": "TEXT_3"}, [1]),
        ({"text": "_"}, [0, 1]),
        ({"text": "0% "}, [2]),
        ({"text": "p2"}, [2]),
        ({"problem": "p1"}, [1]),
        ({"problem": "p"}, []),
    ],
)
def test_prompts_are_found_by_their_rows(registry, query, trees):
    place = {"path": "x", "sha256": "x", "bytes": 7, "statistics": {}}
    registry.results.add_rollouts("1", 2, **place, index=INDEX)
    registry.results.add_rollouts("1", 3, **place, index=[row(0, 9, problem_id="p1")])
    assert registry.queries.matching_trees("1", 2, RolloutQuery(**query)) == trees
    assert registry.results.rollout_index("1", 2, trees) == [i for i in INDEX if i.tree in trees]
    assert registry.queries.problem_steps("1", "p1") == [2, 3]
    assert registry.queries.problem_steps("1", "p7") == []
    assert registry.queries.largest_advantages("1", 2) == {
        "answer": 2.5 - 0.0 - 1.0,
        "confidence": 0.0,
    }


SILENT, LEARNS, LEADS = (1.0, 0.0), (1.0, 0.2), (0.5, 0.0)


@pytest.mark.parametrize(
    ("steps", "idle"),
    [
        ([], 0),
        ([SILENT] * 3, 3),
        ([LEARNS, SILENT, SILENT], 2),
        ([SILENT, LEARNS], 0),  # an entropy bonus needs no signal
        ([SILENT, LEADS, SILENT], 1),  # a critic leads: the policy has a signal, and waits
        ([LEARNS, SILENT, None, None], 3),  # steps that could not be scored
        ([None, SILENT], 1),
    ],
)
def test_the_latest_steps_without_a_gradient_are_counted(registry, steps, idle):
    for number, figures in enumerate(steps, start=7):
        registry.update_run("r-0001", step=number)
        if figures is not None:
            share, norm = figures
            named = {"rollout/zero_signal_answer": share, "train/grad_norm": norm, "perf/x": 1.0}
            registry.results.add_metrics("r-0001", number, named, at=0.0)
    assert registry.queries.idle_steps(["r-0001", "r-0002"]) == {"r-0001": idle, "r-0002": 0}
