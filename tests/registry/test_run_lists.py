"""Lists of runs: what is selected, counted and shown of each."""

import pytest
from rows import each_row
from submissions import submit

from rlx_registry import Registry

ODD = "3 + 4 é \u202e'; DROP TABLE rlx_run;--\n\x1b[31m"


@pytest.fixture
def registry(url):
    """Five runs, of which one finished, one was stopped and one is queued; two are in groups."""
    with Registry.open(url) as opened:
        for seed, name in enumerate(("rlcr", "rlcr", "kg", "kg", "kg")):
            submit(opened, digest=f"d{seed}", seed=seed, name=name, queue=seed == 4)
        for run_id, group in (("2", "rlcr-seeds"), ("1", "rlcr-seeds"), ("1", ODD)):
            opened.join(run_id, group)
        for run_id, end in (("1", "finished"), ("2", "stopped")):
            opened.transition(run_id, ["submitted"], end)
        for step, label in ((1, "step"), (2, "step"), (2, "after")):
            figures = {"accuracy": 0.5 * step, "auroc": None}
            opened.results.add_evaluation("1", step, label, "test", 60, figures, {"bins": [1, 2]})
        yield opened


@each_row(
    ("wanted", "taken"),
    [
        ({}, [5, 4, 3, 2, 1]),
        ({"name": "kg"}, [5, 4, 3]),
        ({"group": "rlcr-seeds"}, [2, 1]),
        ({"statuses": ("finished", "queued")}, [5, 1]),
        ({"name": "rlcr", "statuses": ("stopped",)}, [2]),
        ({"digest": "d1"}, [2]),
        ({"name": "none"}, []),
    ],
)
def test_a_filter_selects_and_counts_the_same_runs(registry, wanted, taken):
    found = registry.runs(**wanted)
    assert [run.id for run in found] == [f"r-{n:04d}" for n in taken]
    assert registry.count_runs(**wanted) == len(found)
    assert registry.runs(limit=2, **wanted) == found[:2]


def test_a_status_that_there_is_not_is_refused(registry):
    with pytest.raises(ValueError, match="unknown status 'done'"):
        registry.runs(statuses=["done"])


def test_what_is_said_of_many_is_what_is_said_of_each(registry):
    ids = [run.id for run in registry.runs()]
    for one, found in registry.queries.evaluation_figures(ids).items():
        whole = [(e.suite, e.label, e.metrics) for e in registry.results.evaluations(one)]
        assert sorted(found, key=str) == sorted(whole, key=str)
    assert any(e.payload for e in registry.results.evaluations("1")), "which is left out"
    members = registry.groups()
    for one, names in registry.queries.groups(ids).items():
        assert sorted(names) == sorted(name for name in members if one in members[name])
    assert ODD in registry.queries.groups(ids)["r-0001"]


def test_the_last_failure_of_each_run(registry):
    for code in (1, 3):
        registry.results.add_event("2", "failed", "why", {"exit_code": code}, level="error")
    registry.results.add_event("3", "failed", "why")
    assert registry.queries.failures(["r-0002", "r-0003", "r-0004"]) == {"r-0002": {"exit_code": 3}}
