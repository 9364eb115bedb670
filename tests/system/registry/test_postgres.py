"""What only a server has: passwords, clocks, lost connections, locks."""

import time
import traceback

import pytest
from postgres import PASSWORD
from sqlalchemy import create_engine, text
from submissions import submit

from rlx_registry import DatabaseUnavailableError, Registry, SchemaError
from rlx_registry import postgres as backend


@pytest.fixture
def database(postgres):
    return postgres.create()


@pytest.fixture
def url(postgres, database):
    return postgres.url(database)


def test_a_database_without_a_registry_is_refused_to_readers(url):
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(SchemaError, match="is not a run registry"):
            Registry.open(url, **options)


def test_a_password_is_never_told(postgres, url):
    wrong = [
        postgres.url("nowhere"),
        postgres.url("postgres", password="wr0ng"),
        f"postgresql+psycopg://rlx:{PASSWORD}@127.0.0.1:1/db",
        f"postgresql+psycopg://rlx@/db?host=/nowhere&password={PASSWORD}",
        f"postgresql+psycopg://rlx:{PASSWORD}@/db?host={postgres.folder}&sslmode=nonsense",
    ]
    for each in wrong:
        with pytest.raises(DatabaseUnavailableError, match="registry postgresql") as told:
            Registry.open(each)
        said = "".join(traceback.format_exception(told.value))
        assert PASSWORD not in said
        assert "wr0ng" not in said
    with (
        Registry.open(url) as registry,
        pytest.raises(DatabaseUnavailableError, match="nonsense") as told,
        registry.open_writer() as connection,
    ):
        connection.exec_driver_sql("SELECT nonsense")
    assert PASSWORD not in "".join(traceback.format_exception(told.value))


def test_a_connection_that_the_server_closed_is_made_again(postgres, url):
    with Registry.open(url) as registry:
        submit(registry)
        postgres.execute(
            "postgres",
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid != pg_backend_pid() AND datname IS NOT NULL",
        )
        registry.results.add_metrics("1", 1, {"loss": 0.5})
        assert registry.results.metrics("1") == {"loss": [(1, 0.5)]}


def test_a_clock_that_is_wrong_is_named(url, monkeypatch):
    Registry.open(url).close()
    real = time.time
    for ahead, words in ((100, "100 s ahead of"), (-100, "100 s behind")):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: real() + ahead)
        with pytest.raises(
            DatabaseUnavailableError, match=f"this machine's clock is {words} that of registry"
        ):
            Registry.open(url, read_only=True)


def test_a_writer_waits_for_the_other_of_its_run_alone(url):
    with Registry.open(url) as one, Registry.open(url) as other:
        for seed in range(2):
            submit(one, seed=seed)
        with one.open_run_writer("1"):
            other.results.add_metrics("2", 1, {"loss": 0.5})
            submit(other, digest="e")
            with (
                pytest.raises(DatabaseUnavailableError, match="have held a lock"),
                other.open_writer() as connection,
            ):
                connection.exec_driver_sql("SET LOCAL lock_timeout = '100ms'")
                connection.exec_driver_sql("UPDATE rlx_run SET step = 1 WHERE id = 1")


def test_a_lock_on_the_tables_is_not_waited_for_without_limit(url, postgres, monkeypatch):
    """Of a process that stands still while it upgrades them, for instance."""
    Registry.open(url).close()
    monkeypatch.setattr(backend, "SESSION", "SET lock_timeout = '300ms'")
    engine = create_engine(url)
    with engine.connect() as frozen:
        frozen.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": backend.SCHEMA_LOCK})
        Registry.open(url).close()  # nothing is to be made or upgraded
        frozen.execute(text("LOCK TABLE rlx_alembic_version IN ACCESS EXCLUSIVE MODE"))
        for read_only in (True, False):
            with pytest.raises(DatabaseUnavailableError, match="one of them may be frozen"):
                Registry.open(url, read_only=read_only)
    engine.dispose()
    Registry.open(url).close()
