"""Registries of every past revision, as their own versions of the code wrote them."""

import pytest
from schemas import kind_of, load, rows, stored, structure

from rlx_registry import Registry, SchemaError, models, schema

KINDS = ("sqlite", "postgresql")
VERSION = models.VERSION_TABLE
OLD_TABLES = {table.name for table in models.metadata.sorted_tables} - {
    *("rlx_device", "rlx_group", "rlx_note", "rlx_plugin")
}


def test_every_revision_is_stored():
    missing = [
        stored(revision, kind).name
        for revision in schema.REVISIONS
        for kind in KINDS
        if not stored(revision, kind).exists()
    ]
    assert not missing, "say: python tests/registry/store_past.py"


@pytest.fixture
def fresh(blank, tmp_path, request):
    """The URL of a registry of the same kind, made by the code as it is."""
    if kind_of(blank) == "sqlite":
        url = f"sqlite:///{tmp_path}/fresh/registry.db"
    else:
        server = request.getfixturevalue("postgres")
        url = server.url(server.create(request.getfixturevalue("template")))
    Registry.open(url).close()
    return url


def test_the_stored_newest_is_the_newest(blank, fresh):
    load(blank, schema.REVISIONS[-1])
    assert structure(blank) == structure(fresh)


@pytest.fixture(params=schema.REVISIONS[:-1])
def past(request, blank):
    """The URL of a past registry, and its revision."""
    load(blank, request.param)
    return blank, request.param


def test_an_upgrade_keeps_every_row(past, fresh, tmp_path):
    url, revision = past
    before = rows(url)
    assert {name for name, found in before.items() if found} >= OLD_TABLES
    assert before[VERSION] == [{"version_num": revision}]
    with pytest.raises(SchemaError):
        Registry.open(url, read_only=True)
    assert rows(url) == before
    assert Registry.upgrade(url) == (revision, schema.REVISIONS[-1])
    after = rows(url)
    assert after.pop(VERSION) == [{"version_num": schema.REVISIONS[-1]}]
    for name, found in after.items():
        old = before.get(name, [])
        empty = dict.fromkeys(found[0].keys() - old[0].keys()) if found and old else {}
        assert found == [{**row, **empty} for row in old], name
    assert structure(url) == structure(fresh)
    if kind_of(url) == "sqlite":  # a server is backed up by whoever runs it
        assert rows(f"sqlite:///{tmp_path}/home/registry.db-{revision}.bak") == before


def test_an_upgraded_registry_is_read_and_written(past):
    url, _ = past
    Registry.upgrade(url)
    with Registry.open(url) as registry:
        assert [(r.name, r.status, r.host) for r in registry.runs()][-3:] == [
            ("kg", "submitted", None),
            ("rlcr", "stopped", None),
            ("rlcr", "finished", None),
        ]
        assert registry.results.metrics("1")["train/loss"] == [(1, 0.5), (2, 0.25)]
        assert [c.after for c in registry.history("1")][-2:] == ["running", "finished"]
        first, second = registry.results.rollout_index("1", 1)
        assert (first.reward, first.rewards) == (1.1, {"accuracy": 1.0, "brier": None})
        assert (first.scores, second.parent_row) == ({}, 0)
        newest = max(int(run.id[2:]) for run in registry.runs())
        run, _ = registry.submit(
            digest="new", seed=0, name="n", spec={}, yaml="", plugins=[], code={}, environment={},
            queue=True,
        )  # fmt: skip
        assert run.id == f"r-{newest + 1:04d}"
        waiting = [run.id for run in registry.runs(status="queued")]
        assert registry.claim(["queued"]).id == waiting[-1], "the oldest"
        for write in (registry.results.add_event, registry.results.add_artifact):
            write("1", "a", "b")
