"""What only a server has: schemas that stay until told, passwords, clocks, lost connections."""

import time
import traceback

import pytest
from click.testing import CliRunner
from postgres import PASSWORD
from schemas import load, structure
from sqlalchemy import create_engine, text

from rlx.cli.verb_group import rlx_command
from rlx_registry import DatabaseUnavailableError, Registry, SchemaError, schema
from rlx_registry import postgres as backend

SUBMISSION = {
    "name": "n", "spec": {}, "yaml": "", "plugins": [], "code": {}, "environment": {}
}  # fmt: skip


@pytest.fixture
def database(postgres):
    return postgres.create()


@pytest.fixture
def url(postgres, database):
    return postgres.url(database)


@pytest.mark.parametrize("revision", schema.REVISIONS[:-1])
def test_an_older_database_is_refused_until_it_is_upgraded(url, revision):
    load(url, revision)
    before = structure(url)
    for read_only in (False, True):
        with pytest.raises(SchemaError, match="rlx db upgrade --registry 'postgresql") as told:
            Registry.open(url, read_only=read_only)
    assert PASSWORD not in str(told.value)
    assert structure(url) == before

    said = CliRunner().invoke(rlx_command, ["db", "upgrade", "--registry", url])
    newest = schema.REVISIONS[-1]
    wanted = f"upgraded the registry from revision {revision} to {newest}\n"
    assert (said.output, said.exit_code) == (wanted, 0)


def test_upgrading_twice_is_nothing_to_do(blank):
    Registry.open(blank).close()
    assert Registry.upgrade(blank) == (schema.REVISIONS[-1],) * 2


def test_a_failed_upgrade_changes_nothing(url, tmp_path, monkeypatch):
    Registry.open(url).close()
    before = structure(url)
    versions = tmp_path / "versions"
    versions.mkdir()
    for file in ("env.py", "script.py.mako", *(f"versions/{n.name}" for n in versions_of())):
        (tmp_path / file).write_text((schema.MIGRATIONS / file).read_text())
    (versions / "9999_later.py").write_text(
        "from alembic import op\n"
        f"revision = '9999'\ndown_revision = {schema.REVISIONS[-1]!r}\n"
        "def upgrade():\n    op.drop_table('rlx_mirror')\n    raise ValueError('half way')\n"
    )
    monkeypatch.setattr(schema, "MIGRATIONS", tmp_path)
    monkeypatch.setattr(schema, "REVISIONS", (*schema.REVISIONS, "9999"))
    with pytest.raises(ValueError, match="half way"):
        Registry.upgrade(url)
    assert structure(url) == before


def versions_of():
    return sorted((schema.MIGRATIONS / "versions").glob("0*.py"))


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
        registry.database.open_writer() as connection,
    ):
        connection.exec_driver_sql("SELECT nonsense")
    assert PASSWORD not in "".join(traceback.format_exception(told.value))


def test_a_connection_that_the_server_closed_is_made_again(postgres, url):
    with Registry.open(url) as registry:
        registry.submit(digest="d", seed=0, **SUBMISSION)
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
            one.submit(digest="d", seed=seed, **SUBMISSION)
        with one.database.open_run_writer("1"):
            other.results.add_metrics("2", 1, {"loss": 0.5})
            other.submit(digest="e", seed=0, **SUBMISSION)
            with (
                pytest.raises(DatabaseUnavailableError, match="have held a lock"),
                other.database.open_writer() as connection,
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
