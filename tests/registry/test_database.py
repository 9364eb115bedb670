"""An SQLite file: schema, upgrades, odd places, light imports."""

import os
import shutil
import sqlite3
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from many import processes
from schemas import structure
from sqlalchemy import create_engine

from rlx_registry import (
    DatabaseUnavailableError,
    Registry,
    RegistryDatabaseError,
    SchemaError,
    models,
    schema,
    sqlite,
)

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


def test_migrations_make_the_tables_that_a_new_registry_has(path, tmp_path):
    Registry.open(url(path)).close()
    migrated = create_engine(url(tmp_path / "migrated.db"))
    with migrated.begin() as connection:
        schema.upgrade_schema(connection)
    migrated.dispose()
    described, made = structure(url(path)), structure(url(tmp_path / "migrated.db"))
    assert len(made) > 20
    assert made == described
    of_version = f"SELECT sql FROM sqlite_master WHERE name = '{models.VERSION_TABLE}'"
    new, old = (query(p, of_version)[0][0].split() for p in (path, tmp_path / "migrated.db"))
    assert new == old, "the table that tells the revision"
    newest = f"SELECT version_num FROM {models.VERSION_TABLE}"
    assert query(path, newest) == query(tmp_path / "migrated.db", newest)


def test_the_code_knows_every_revision():
    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert tuple(r.revision for r in script.walk_revisions())[::-1] == schema.REVISIONS


@pytest.fixture
def future(tmp_path, monkeypatch):
    """A later version of the code, with one more migration."""

    def travel():
        folder = tmp_path / "migrations"
        shutil.copytree(schema.MIGRATIONS, folder)
        (folder / "versions" / "9999_later.py").write_text(
            "import sqlalchemy as sa\nfrom alembic import op\n"
            f"revision = '9999'\ndown_revision = {schema.REVISIONS[-1]!r}\n"
            "def upgrade():\n"
            "    with op.batch_alter_table('rlx_run', recreate='always') as batch:\n"
            "        batch.add_column(sa.Column('lease_owner', sa.Text()))\n"
        )
        monkeypatch.setattr(schema, "MIGRATIONS", folder)
        monkeypatch.setattr(schema, "REVISIONS", (*schema.REVISIONS, "9999"))

    return travel


def test_an_older_database_is_copied_and_upgraded(path, future):
    with Registry.open(url(path)) as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
        registry.results.add_metrics("1", 1, {"loss": 0.5})
    future()
    with pytest.raises(SchemaError, match="opening it once for writing upgrades it"):
        Registry.open(url(path), read_only=True)
    Registry.open(url(path)).close()
    assert query(path, "SELECT lease_owner FROM rlx_run") == [(None,)]
    assert query(path, "SELECT value FROM rlx_metric") == [(0.5,)]
    backup = path.with_name(f"registry.db-{schema.REVISIONS[-2]}.bak")
    assert query(backup, "SELECT digest FROM rlx_run") == [("d",)]


def test_a_newer_database_is_refused_and_left_alone(path, future, monkeypatch):
    with monkeypatch.context():
        future()
        Registry.open(url(path)).close()
    monkeypatch.undo()
    before = structure(url(path))
    for read_only in (False, True):
        with pytest.raises(SchemaError, match="at revision 9999, which a newer version of rlx"):
            Registry.open(url(path), read_only=read_only)
    assert structure(url(path)) == before


def test_a_failed_upgrade_leaves_the_database_as_it_was(path, future):
    Registry.open(url(path)).close()
    before = structure(url(path))
    future()
    later = schema.MIGRATIONS / "versions" / "9999_later.py"
    later.write_text(later.read_text() + "    raise ValueError('half way')\n")
    with pytest.raises(ValueError, match="half way"):
        Registry.open(url(path))
    assert structure(url(path)) == before
    here = query(path, "SELECT version_num FROM rlx_alembic_version")
    assert here == [(schema.REVISIONS[-2],)]  # the last is the one that failed


def test_one_that_is_interrupted_while_it_is_made_leaves_no_part_of_it(path, monkeypatch):
    """A reader would take that for somebody else's database."""

    def interrupt(connection):
        connection.exec_driver_sql("CREATE TABLE half (a)")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("rlx_registry.schema.create_schema", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Registry.open(f"sqlite:///{path}")
    assert not path.exists()
    Registry.open(f"sqlite:///{path}").close()
    with Registry.open(f"sqlite:///{path}", read_only=True) as registry:
        assert registry.runs() == []
    assert not list(path.parent.glob("*.new*"))


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
        ("mysql://me:s3cr3t@host/db", "SQLite or PostgreSQL, not 'mysql'"),
        (
            "postgresql+psycopg2://me:s3cr3t@host/db",
            r"through psycopg, not .*; write postgresql\+ps",
        ),
        ("postgresql://me:s3cr3t@host:port/db", "the registry's URL is not a database URL"),
        ("://me:s3cr3t@host", "the registry's URL is not a database URL"),
        ("registry.db", "not a database URL"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_unusable_urls_are_refused_in_words(wrong, words):
    with pytest.raises(DatabaseUnavailableError, match=words) as told:
        Registry.open(wrong)
    assert "s3cr3t" not in "".join(traceback.format_exception(told.value, chain=True)[-1:])


def test_a_missing_or_foreign_file_is_refused_in_words(path, tmp_path):
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(DatabaseUnavailableError, match="there is no registry at"):
            Registry.open(url(path), **options)
    assert list(tmp_path.iterdir()) == []
    path.write_text("not a database, but long enough to be looked at " * 50)
    for read_only in (False, True):
        with pytest.raises(RegistryDatabaseError, match="not a database"):
            Registry.open(url(path), read_only=read_only)


def test_a_database_without_a_registry_is_refused_in_words(path):
    query(path, "CREATE TABLE somebody_elses (a)")
    with pytest.raises(SchemaError, match="is not a run registry"):
        Registry.open(url(path), read_only=True)


def test_a_finished_registry_can_be_read_where_nothing_can_be_written(path, monkeypatch):
    with Registry.open(url(path)) as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
    before = sorted(path.parent.iterdir())
    monkeypatch.setattr(sqlite.os, "access", lambda *_: False)
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


def test_a_flipped_bit_in_a_value_is_a_damaged_registry(path):
    with Registry.open(url(path)) as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
    raw = sqlite3.connect(path)
    raw.execute("UPDATE rlx_run SET spec = '{\"a\"z 1}'")
    raw.commit()
    raw.close()
    with (
        Registry.open(url(path), read_only=True) as registry,
        pytest.raises(RegistryDatabaseError, match=r"is damaged: .* `rlx db import` restores"),
    ):
        registry.run("1")


def test_write_ahead_log_and_foreign_keys_are_on(path):
    with Registry.open(url(path)) as registry, registry.database.open_writer() as connection:
        values = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        ]
    assert values == ["wal", 1, 1, 15000]


def test_a_writer_that_never_has_its_turn_says_so(path, monkeypatch):
    with Registry.open(url(path)) as one, Registry.open(url(path)) as other:
        one.submit(digest="d", seed=0, **SUBMISSION)
        monkeypatch.setattr(sqlite, "PATIENCE", 0.1)
        with (
            one.database.open_writer(),
            pytest.raises(DatabaseUnavailableError, match=r"locked by other writers for 0\.1 s"),
        ):
            other.results.add_metrics("1", 1, {"loss": 0.5})
        other.results.add_metrics("1", 1, {"loss": 0.5})
        assert one.results.metrics("1") == {"loss": [(1, 0.5)]}


FROZEN = """
import os, signal
from rlx_registry import Registry
with Registry.open({url!r}) as registry, registry.database.open_writer() as connection:
    connection.exec_driver_sql("UPDATE rlx_run SET step = 5")
    os.write({pipe}, b"w")
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextmanager
def frozen_writer(url):
    """A process that is stopped in the middle of a transaction."""
    out, into = os.pipe()
    script = FROZEN.format(url=url, pipe=into)
    process = subprocess.Popen([sys.executable, "-c", script], pass_fds=[into])
    try:
        assert os.read(out, 1) == b"w"
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield
    finally:
        process.kill()
        process.wait()
        os.close(out)
        os.close(into)


def test_a_frozen_writer_stops_readers_never_and_writers_not_for_ever(path, monkeypatch):
    monkeypatch.setattr(sqlite, "PATIENCE", 0.5)
    with Registry.open(url(path)) as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
    with frozen_writer(url(path)):
        with Registry.open(url(path), read_only=True) as registry:
            assert registry.run("1").step == 0
        with (
            Registry.open(url(path)) as registry,
            pytest.raises(DatabaseUnavailableError, match=r"for 0\.5 s; one of them may be frozen"),
        ):
            registry.update_run("1", step=1)
    with Registry.open(url(path)) as registry:
        registry.update_run("1", step=1)
        assert registry.run("1").step == 1


def test_a_registry_that_must_be_upgraded_is_not_waited_for_without_limit(path, monkeypatch):
    with Registry.open(url(path)) as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
    monkeypatch.setattr(sqlite, "PATIENCE", 0.5)
    with frozen_writer(url(path)):
        monkeypatch.setattr(schema, "REVISIONS", (*schema.REVISIONS, "9999"))
        with pytest.raises(DatabaseUnavailableError, match=r"locked by other writers for 0\.5 s"):
            Registry.open(url(path))


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
