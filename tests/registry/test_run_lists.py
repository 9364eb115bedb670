"""Lists of runs: what is selected, counted and shown of each."""

import pytest
from filled import ODD, fill

from rlx_registry import Registry


@pytest.fixture
def registry(url, tmp_path):
    with Registry.open(url) as opened:
        fill(opened, tmp_path)
        yield opened


FILTERS = {
    "all": {},
    "name": {"name": "kg"},
    "group": {"group": "rlcr-seeds"},
    "two statuses": {"statuses": ("finished", "queued")},
    "name and status": {"name": "kg", "statuses": ("stopped",)},
    "digest": {"digest": f"{1:064d}"},
    "no such": {"name": "none"},
}
TAKEN = {
    "all": [5, 4, 3, 2, 1],
    "name": [5, 4, 3],
    "group": [2, 1],
    "digest": [2],
    "no such": [],
}


@pytest.mark.parametrize("of", FILTERS)
def test_a_filter_selects_and_counts_the_same_runs(registry, of):
    wanted = FILTERS[of]
    found = registry.runs(**wanted)
    if of in TAKEN:
        assert [run.id for run in found] == [f"r-{n:04d}" for n in TAKEN[of]]
    statuses = wanted.get("statuses")
    assert all(run.effective_status in statuses for run in found if statuses)
    assert registry.count_runs(**wanted) == len(found)
    assert registry.runs(limit=2, **wanted) == found[:2]


def test_times_bound_the_submission(registry):
    runs = registry.runs()
    middle = runs[2].created
    earlier = registry.runs(created_before=middle)
    assert earlier == [run for run in runs if run.created < middle] != []


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
