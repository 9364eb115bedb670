"""An SQLite file: schema, odd places, network disks as far as a machine without one can show them,
light imports."""

import sqlite3
import traceback
from pathlib import Path

import pytest
from many import processes
from rows import each_row
from submissions import submit

from rlx.errors import SpecError
from rlx.launch import open_registry
from rlx_registry import (
    DatabaseUnavailableError,
    Registry,
    RegistryDatabaseError,
    SchemaError,
    models,
    sqlite,
)

MOUNT = "36 35 {device} / /mnt rw,noatime master:1 - {kind} server:/export rw"


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


def test_anpaths_database_is_refused_and_left_alone(path):
    Registry.open(url(path)).close()
    query(path, f"UPDATE {models.VERSION_TABLE} SET version_num = '0042'")
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(SchemaError, match="at revision 0042, and this version of rlx uses"):
            Registry.open(url(path), read_only=read_only)
    assert path.read_bytes() == before


def test_one_that_is_interrupted_while_it_is_made_is_made_by_the_next(path, monkeypatch):
    def interrupt(connection):
        connection.exec_driver_sql("CREATE TABLE half (a)")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(models, "create_tables", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Registry.open(url(path))
    assert query(path, "SELECT name FROM sqlite_master") == []
    Registry.open(url(path)).close()
    with Registry.open(url(path), read_only=True) as registry:
        assert registry.runs() == []


def test_somebody_elses_tables_are_left_alone(path):
    query(path, "CREATE TABLE alembic_version (version_num TEXT)")
    query(path, "INSERT INTO alembic_version VALUES ('mlflow')")
    Registry.open(url(path)).close()
    assert query(path, "SELECT * FROM alembic_version") == [("mlflow",)]
    query(path, "DROP TABLE rlx_alembic_version")
    with pytest.raises(SchemaError, match="no revision"):
        Registry.open(url(path))


@each_row(
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


def test_a_registry_whose_creation_was_interrupted_is_none_yet(path):
    query(path, "PRAGMA journal_mode=wal")
    assert path.exists()
    with (
        pytest.raises(SpecError, match="submit an experiment first"),
        open_registry(url(path)) as registry,
    ):
        registry.runs()
    with Registry.open(url(path)) as registry:
        assert registry.runs() == []


def test_a_finished_registry_can_be_read_where_nothing_can_be_written(path, monkeypatch):
    with Registry.open(url(path)) as registry:
        submit(registry)
    before = sorted(path.parent.iterdir())
    monkeypatch.setattr(sqlite.os, "access", lambda *_: False)
    with Registry.open(url(path), read_only=True) as registry:
        assert registry.run("1").digest == "d"
        assert sorted(path.parent.iterdir()) == before  # readers of a live one leave files


def test_a_network_disk_has_no_shared_log_also_where_the_registry_moves(path, monkeypatch):
    number = path.parent.stat().st_dev
    device = f"{sqlite.os.major(number)}:{sqlite.os.minor(number)}"
    for kind, mode in (("ext4", "wal"), ("nfs4", "delete"), ("xfs", "wal"), ("cifs", "delete")):
        table = f"22 1 0:21 / /proc rw - proc proc rw\n{MOUNT.format(device=device, kind=kind)}"
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_text", lambda _, table=table: table)
            with Registry.open(url(path)) as registry, registry.open_writer() as connection:
                pragmas = [
                    connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                    for name in ("journal_mode", "synchronous")
                ]
        assert pragmas == [mode, 1 if mode == "wal" else 2], kind
    assert not list(path.parent.glob("*-wal"))


def test_a_flipped_bit_in_a_value_is_a_damaged_registry(path):
    with Registry.open(url(path)) as registry:
        submit(registry)
    query(path, "UPDATE rlx_run SET spec = '{\"a\"z 1}'")
    with (
        Registry.open(url(path), read_only=True) as registry,
        pytest.raises(RegistryDatabaseError, match=r"is damaged: .* restore a backup"),
    ):
        registry.run("1")


def test_a_writer_that_waits_says_for_what_and_gives_up(path, monkeypatch, caplog):
    with Registry.open(url(path)) as one, Registry.open(url(path)) as other:
        submit(one)
        monkeypatch.setattr(sqlite, "TURN_SECONDS", 0.1)
        monkeypatch.setattr(sqlite, "SILENT_SECONDS", 0.0)
        with (
            one.open_writer(),
            pytest.raises(DatabaseUnavailableError, match=r"for 0\.1 s; one of them may be frozen"),
        ):
            other.results.add_metrics("1", 1, {"loss": 0.5})
        other.results.add_metrics("1", 1, {"loss": 0.5})
        assert one.results.metrics("1") == {"loss": [(1, 0.5)]}
    assert caplog.messages[0].startswith(
        f"waiting for other processes to release {path}.lock; one of them may"
    )


def test_a_new_registry_beside_folders_of_runs_says_what_was_lost(path, caplog):
    (path.parent / "runs" / "r-0001").mkdir(parents=True)
    (path.parent / "runs" / ".unrecorded-1-1-x").mkdir()
    Registry.open(url(path)).close()
    (line,) = caplog.messages
    assert line.startswith(f"a new registry is made at {path}, and the 1 run folders in")
    assert "put back a backup of" in line
    Registry.open(url(path)).close()
    assert len(caplog.messages) == 1


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
