"""Many processes and threads over one registry, on both kinds of database."""

import pytest
from many import processes
from submissions import submit

from rlx_registry import DatabaseUnavailableError, Registry, models

SUBMIT = """
import sys
from rlx_registry import Registry
url, seed = sys.argv[1], int(sys.argv[2])
begin_together()
with Registry.open(url) as registry:
    for digest in ("shared", f"own{seed}"):
        run, created = registry.submit(digest=digest, seed=0, name="n", spec={}, yaml="",
                                       plugins=[], code={}, environment={})
        print(run.id, created)
"""


def test_eight_processes_submit_at_once_to_a_registry_that_is_not_there_yet(blank):
    found = processes(SUBMIT, [(blank, i) for i in range(8)])
    assert len({shared for shared, *_ in found}) == 1
    assert [created for _, created, *_ in found].count("True") == 1
    assert len({own for _, _, own, _ in found}) == 8
    assert {created for *_, created in found} == {"True"}
    with Registry.open(blank, read_only=True) as registry:
        assert [run.id for run in registry.runs()] == [f"r-{i:04d}" for i in range(9, 0, -1)]


WRITE = """
import sys
from rlx_registry import Registry
url, number = sys.argv[1], int(sys.argv[2])
with Registry.open(url) as registry:
    begin_together()
    for step in range(25):
        registry.results.add_metrics("1", step, {f"m{number}": step, "shared": number})
        registry.heartbeat("1")
        registry.results.metrics("1")
    print(registry.transition("1", ["submitted"], "running", str(number)))
"""


def test_concurrent_writers_wait_their_turn_and_one_wins_the_transition(blank):
    with Registry.open(blank) as registry:
        submit(registry)
        found = processes(WRITE, [(blank, i) for i in range(4)])
        assert sorted(found) == [["False"]] * 3 + [["True"]]
        assert len(registry.history("1")) == 2
        assert registry.run("1").attempt == 1
        series = registry.results.metrics("1")
        assert {name: len(points) for name, points in series.items()} == {
            **{f"m{i}": 25 for i in range(4)},
            "shared": 25,
        }
        rows = registry.results.metric_rows_after("1", 0, 1000)
        assert len({row.seq for row in rows}) == len(rows) == 125


def test_a_reader_sees_a_live_writer_and_cannot_write(blank):
    with Registry.open(blank) as writer, Registry.open(blank, read_only=True) as reader:
        submit(writer)
        assert reader.run("latest").digest == "d"
        with pytest.raises(DatabaseUnavailableError, match="for reading only"):
            reader.results.add_metrics("1", 1, {"a": 1.0})
        with (
            reader.open_reader() as connection,
            pytest.raises(Exception, match=r"read-?only"),
        ):
            connection.execute(models.run.delete())
        with reader.open_reader() as connection:
            connection.execute(models.run.select()).all()
            # a reader in mid-transaction locks nobody
            writer.results.add_metrics("1", 1, {"a": 1.0})
