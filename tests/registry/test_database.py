"""The database itself: schema, upgrades, many processes, read-only engines, light imports."""

import shutil
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from rlx_registry import Registry, RegistryError, SchemaError, Unavailable, engine, models

ROOT = Path(__file__).parents[2]
SUBMISSION = {
    "name": "n", "spec": {}, "yaml": "", "plugins": [], "code": {}, "environment": {}
}  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.db"


def url(path):
    return f"sqlite:///{path}"


def query(path, sql):
    raw = sqlite3.connect(path)
    try:
        with raw:
            return raw.execute(sql).fetchall()
    finally:
        raw.close()


def schema(path):
    wanted = "SELECT type, name, sql FROM sqlite_master WHERE tbl_name LIKE 'rlx_%'"
    return query(path, f"{wanted} AND tbl_name != '{models.VERSION_TABLE}' ORDER BY name")


def processes(script, arguments):
    """Runs one Python process per argument list at once; returns what each printed."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, each)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in arguments
    ]
    results = [process.communicate(timeout=60) for process in running]
    for process, (_, errors) in zip(running, results, strict=True):
        assert process.returncode == 0, errors
    return [output.split() for output, _ in results]


def test_migrations_make_the_tables_that_the_code_describes(path, tmp_path):
    Registry.open(url(path)).close()
    direct = create_engine(f"sqlite:///{tmp_path}/direct.db")
    models.metadata.create_all(direct)
    direct.dispose()
    described, made = normal(schema(tmp_path / "direct.db")), normal(schema(path))
    assert len(made) > 20
    assert made == described


def normal(rows):
    """Sorts the lines of each table: the order of its constraints means nothing, nor do the quotes
    that SQLite puts around the name of a table that was rebuilt."""
    return {
        (kind, name): sorted(
            line.strip().rstrip(",").replace('"', "") for line in (sql or "").splitlines()
        )
        for kind, name, sql in rows
    }


def test_the_code_knows_every_revision():
    config = Config()
    config.set_main_option("script_location", str(engine.MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert tuple(r.revision for r in script.walk_revisions())[::-1] == engine.REVISIONS


@pytest.fixture
def future(tmp_path, monkeypatch):
    """A later version of the code, with one more migration."""

    def travel():
        folder = tmp_path / "migrations"
        shutil.copytree(engine.MIGRATIONS, folder)
        (folder / "versions" / "9999_later.py").write_text(
            "import sqlalchemy as sa\nfrom alembic import op\n"
            f"revision = '9999'\ndown_revision = {engine.REVISIONS[-1]!r}\n"
            "def upgrade():\n"
            "    with op.batch_alter_table('rlx_run', recreate='always') as batch:\n"
            "        batch.add_column(sa.Column('lease_owner', sa.Text()))\n"
        )
        monkeypatch.setattr(engine, "MIGRATIONS", folder)
        monkeypatch.setattr(engine, "REVISIONS", (*engine.REVISIONS, "9999"))

    return travel


def test_an_older_database_is_copied_and_upgraded(path, future):
    with Registry.open(url(path)) as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
        registry.add_metrics("1", 1, {"loss": 0.5})
    future()
    with pytest.raises(SchemaError, match="opening it once for writing upgrades it"):
        Registry.open(url(path), read_only=True)
    Registry.open(url(path)).close()
    assert query(path, "SELECT lease_owner FROM rlx_run") == [(None,)]
    assert query(path, "SELECT value FROM rlx_metric") == [(0.5,)]
    backup = path.with_name(f"registry.db-{engine.REVISIONS[-2]}.bak")
    assert query(backup, "SELECT digest FROM rlx_run") == [("d",)]


@pytest.mark.parametrize("revision", engine.REVISIONS[:-1])
def test_a_database_of_every_past_revision_is_upgraded(path, revision, tmp_path):
    raw = sqlite3.connect(path)
    raw.executescript((Path(__file__).parent / f"revision_{revision}.sql").read_text())
    raw.close()
    with pytest.raises(SchemaError, match="opening it once for writing upgrades it"):
        Registry.open(url(path), read_only=True)
    with Registry.open(url(path)) as registry:
        (row,) = registry.rollout_index("1", 1)
        assert (row.reward, row.rewards, row.scores) == (1.0, {"accuracy": 1.0}, {})
        assert registry.metrics("1") == {"train/loss": [(1, 0.5)]}
        assert [change.after for change in registry.history("1")][-1] == "finished"
        place = {"path": "x", "sha256": "x", "bytes": 1, "statistics": {}}
        registry.add_rollouts("1", 2, **place, index=[replace(row, scores={"a": 0.5})])
        assert registry.rollout_index("1", 2)[0].scores == {"a": 0.5}
    Registry.open(url(tmp_path / "new.db")).close()
    assert normal(schema(path)) == normal(schema(tmp_path / "new.db"))


def test_a_newer_database_is_refused_and_left_alone(path, future, monkeypatch):
    with monkeypatch.context():
        future()
        Registry.open(url(path)).close()
    monkeypatch.undo()
    before = schema(path)
    for read_only in (False, True):
        with pytest.raises(SchemaError, match="at revision 9999, which a newer version of rlx"):
            Registry.open(url(path), read_only=read_only)
    assert schema(path) == before


def test_a_failed_upgrade_leaves_the_database_as_it_was(path, future):
    Registry.open(url(path)).close()
    before = schema(path)
    future()
    later = engine.MIGRATIONS / "versions" / "9999_later.py"
    later.write_text(later.read_text() + "    raise ValueError('half way')\n")
    with pytest.raises(ValueError, match="half way"):
        Registry.open(url(path))
    assert schema(path) == before
    here = query(path, "SELECT version_num FROM rlx_alembic_version")
    assert here == [(engine.REVISIONS[-2],)]  # the last is the one that failed


def test_somebody_elses_tables_are_left_alone(path):
    query(path, "CREATE TABLE alembic_version (version_num TEXT)")
    query(path, "INSERT INTO alembic_version VALUES ('mlflow')")
    Registry.open(url(path)).close()
    assert query(path, "SELECT * FROM alembic_version") == [("mlflow",)]
    query(path, "DROP TABLE rlx_alembic_version")
    with pytest.raises(SchemaError, match="no revision"):
        Registry.open(url(path))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("postgresql://host/db", "SQLite files, not 'postgresql'"),
        ("registry.db", "not a database URL"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_unusable_urls_are_refused_in_words(wrong, words):
    with pytest.raises(Unavailable, match=words):
        Registry.open(wrong)


def test_a_missing_or_foreign_file_is_refused_in_words(path, tmp_path):
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(Unavailable, match="there is no registry at"):
            Registry.open(url(path), **options)
    assert list(tmp_path.iterdir()) == []
    path.write_text("not a database, but long enough to be looked at " * 50)
    for read_only in (False, True):
        with pytest.raises(RegistryError, match="not a database"):
            Registry.open(url(path), read_only=read_only)


def test_a_database_without_a_registry_is_refused_in_words(path):
    query(path, "CREATE TABLE somebody_elses (a)")
    with pytest.raises(SchemaError, match="is no registry of runs"):
        Registry.open(url(path), read_only=True)


def test_a_finished_registry_can_be_read_where_nothing_can_be_written(path, monkeypatch):
    with Registry.open(url(path)) as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
    before = sorted(path.parent.iterdir())
    monkeypatch.setattr(engine.os, "access", lambda *_: False)
    with Registry.open(url(path), read_only=True) as registry:
        assert registry.run("1").digest == "d"
        assert sorted(path.parent.iterdir()) == before  # readers of a live one leave files


def test_odd_file_names_work(tmp_path):
    odd = tmp_path / "a b%20?#é.db"
    with Registry.open(f"sqlite:///{quote(str(odd))}") as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
    assert odd.exists()
    with Registry.open(f"sqlite:///{quote(str(odd))}", read_only=True) as registry:
        assert registry.run("1").digest == "d"


def test_a_reader_sees_a_live_writer_and_cannot_write(path):
    with Registry.open(url(path)) as writer, Registry.open(url(path), read_only=True) as reader:
        writer.submit(digest="d", seed=0, **SUBMISSION)
        assert reader.run("latest").digest == "d"
        with pytest.raises(Unavailable, match="for reading only"):
            reader.add_metrics("1", 1, {"a": 1.0})
        with reader._reading() as connection, pytest.raises(Exception, match="readonly"):
            connection.execute(models.run.delete())
        with reader._reading() as connection:
            connection.execute(models.run.select()).all()
            writer.add_metrics("1", 1, {"a": 1.0})  # a reader in mid-transaction locks nobody


def test_write_ahead_log_and_foreign_keys_are_on(path):
    with Registry.open(url(path)) as registry, registry._writing() as connection:
        values = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        ]
    assert values == ["wal", 1, 1, 15000]


SUBMIT = """
import sys
from rlx_registry import Registry
url, start, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
import time; time.sleep(max(0, start - time.time()))
with Registry.open(url) as registry:
    for digest in ("shared", f"own{seed}"):
        run, created = registry.submit(digest=digest, seed=0, name="n", spec={}, yaml="",
                                       plugins=[], code={}, environment={})
        print(run.id, created)
"""


def test_eight_processes_submit_at_once_to_a_registry_that_is_not_there_yet(path):
    found = processes(SUBMIT, [(url(path), time.time() + 1.0, i) for i in range(8)])
    assert len({shared for shared, *_ in found}) == 1
    assert [created for _, created, *_ in found].count("True") == 1
    assert len({own for _, _, own, _ in found}) == 8
    assert {created for *_, created in found} == {"True"}
    assert query(path, "SELECT count(*), max(id) FROM rlx_run") == [(9, 9)]


WRITE = """
import sys, time
from rlx_registry import Registry
url, start, number = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
with Registry.open(url) as registry:
    time.sleep(max(0, start - time.time()))
    for step in range(60):
        registry.add_metrics("1", step, {f"m{number}": step, "shared": number})
        registry.heartbeat("1")
        registry.metrics("1")
    print(registry.transition("1", ["submitted"], "running", str(number)))
"""


def test_concurrent_writers_wait_their_turn_and_one_wins_the_transition(path):
    with Registry.open(url(path)) as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
        found = processes(WRITE, [(url(path), time.time() + 1.0, i) for i in range(4)])
        assert sorted(found) == [["False"]] * 3 + [["True"]]
        assert len(registry.history("1")) == 2
        assert registry.run("1").attempt == 1
        series = registry.metrics("1")
        assert {name: len(points) for name, points in series.items()} == {
            **{f"m{i}": 60 for i in range(4)},
            "shared": 60,
        }
        rows = registry.metric_rows_after("1", 0, 1000)
        assert len({row.seq for row in rows}) == len(rows) == 300


def test_threads_share_a_registry(path):
    with Registry.open(url(path)) as registry, ThreadPoolExecutor(4) as pool:
        registry.submit(digest="d", seed=0, **SUBMISSION)

        def work(number):
            registry.add_metrics("1", number, {"loss": number})
            return registry.heartbeat("1") and len(registry.metrics("1")["loss"]) > 0

        assert all(pool.map(work, range(40)))
        assert len(registry.metrics("1")["loss"]) == 40


def test_importing_and_reading_stay_light(path):
    Registry.open(url(path)).close()
    script = f"""
import sys
import rlx_registry
rlx_registry.Registry.open({url(path)!r}, create=False).close()
heavy = "torch transformers mlflow deepspeed rlx alembic pyarrow numpy pydantic".split()
print([name for name in heavy if name in sys.modules])
"""
    assert processes(script, [()]) == [["[]"]]


def test_speed_of_a_step(path):
    """Generous limits: they catch a lost index or a commit per row, not a slow machine."""
    with Registry.open(url(path)) as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
        values = {f"group/m{i}": float(i) for i in range(40)}
        registry.add_metrics("1", 0, values)
        times = []
        for step in range(1, 40):
            begin = time.perf_counter()
            registry.add_metrics("1", step, values)
            times.append(time.perf_counter() - begin)
    assert sorted(times)[len(times) // 2] < 0.02
