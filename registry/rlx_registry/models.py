"""The SQL tables, how they are created, and the check of their revision.

Every table has the prefix `rlx_`, because the registry may share a database. Every constraint has a
name, because unnamed constraints cannot be altered later. Run ids are integers here and "r-0001"
in the public interface.
"""

from collections.abc import Iterable

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    insert,
    inspect,
    text,
)

from rlx_registry.column_values import AnyText, FolderPath
from rlx_registry.errors import NoTablesError, SchemaError
from rlx_registry.records import LABELS, REQUESTS, STATUSES

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

REVISION = "0006"
"""The schema's revision, which a registry records of itself."""
VERSION_TABLE = "rlx_alembic_version"


def _build_choice_constraint(column: str, values: Iterable[str]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


def _build_json_column(name: str, *, nullable: bool = False) -> "Column[object]":
    return Column(name, JSON(none_as_null=True), nullable=nullable)


def _build_run_column() -> "Column[int]":
    return Column("run_id", ForeignKey("rlx_run.id"), primary_key=True)


run = Table(
    "rlx_run",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", AnyText, nullable=False),
    Column("digest", AnyText, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("status", AnyText, nullable=False),
    Column("step", Integer, nullable=False, default=0),
    Column("steps_total", Integer),
    Column("created", Double, nullable=False),
    Column("started", Double),
    Column("ended", Double),
    Column("reason", AnyText),
    Column("directory", FolderPath),
    Column("mlflow_run_id", AnyText),
    Column("mlflow_experiment_id", AnyText),
    Column("attempt", Integer, nullable=False, default=0),
    Column("heartbeat", Double),
    Column("pid", Integer),
    Column("phase", AnyText),
    Column("yaml", AnyText, nullable=False),
    _build_json_column("spec"),
    _build_json_column("plugins"),
    _build_json_column("code"),
    _build_json_column("environment"),
    Column("host", AnyText),
    Column("request", AnyText),
    _build_json_column("origins", nullable=True),
    _build_choice_constraint("status", STATUSES),
    _build_choice_constraint("request", REQUESTS),
    Index(None, "digest", "seed"),
    Index(None, "name"),
    sqlite_autoincrement=True,
)

status_change = Table(
    "rlx_status_change",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("rlx_run.id"), nullable=False),
    Column("at", Double, nullable=False),
    Column("before", AnyText),
    Column("after", AnyText, nullable=False),
    Column("reason", AnyText),
    Column("attempt", Integer, nullable=False),
    _build_choice_constraint("before", STATUSES),
    _build_choice_constraint("after", STATUSES),
    Index(None, "run_id"),
)

device = Table(
    "rlx_device",
    metadata,
    Column("host", AnyText, primary_key=True),
    Column("name", AnyText, primary_key=True),
    Column("run_id", ForeignKey("rlx_run.id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("at", Double, nullable=False),
)

event = Table(
    "rlx_event",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("rlx_run.id"), nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", AnyText, nullable=False),
    Column("level", AnyText, nullable=False),
    Column("message", AnyText, nullable=False),
    _build_json_column("payload", nullable=True),
    Index(None, "run_id", "id"),
    sqlite_autoincrement=True,
)

metric_key = Table(
    "rlx_metric_key",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", AnyText, nullable=False, unique=True),
)

metric = Table(
    "rlx_metric",
    metadata,
    _build_run_column(),
    Column("key_id", ForeignKey("rlx_metric_key.id"), primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("value", Double, nullable=False),
    Column("at", Double, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Index(None, "run_id", "seq", unique=True),
    sqlite_with_rowid=False,
)

evaluation = Table(
    "rlx_evaluation",
    metadata,
    _build_run_column(),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("label", AnyText, primary_key=True),
    Column("suite", AnyText, primary_key=True),
    Column("n", Integer, nullable=False),
    _build_json_column("metrics"),
    _build_json_column("payload", nullable=True),
    Column("at", Double, nullable=False),
    _build_choice_constraint("label", LABELS),
)

checkpoint = Table(
    "rlx_checkpoint",
    metadata,
    _build_run_column(),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("path", AnyText, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", AnyText, nullable=False),
    Column("at", Double, nullable=False),
)

artifact = Table(
    "rlx_artifact",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("run_id", ForeignKey("rlx_run.id"), nullable=False),
    Column("path", AnyText, nullable=False),
    Column("kind", AnyText, nullable=False),
    Column("at", Double, nullable=False),
    Index(None, "run_id", "path", unique=True),
    sqlite_autoincrement=True,
)

rollout_step = Table(
    "rlx_rollout_step",
    metadata,
    _build_run_column(),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("path", AnyText, nullable=False),
    Column("sha256", AnyText, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    _build_json_column("statistics"),
    Column("at", Double, nullable=False),
)

rollout = Table(
    "rlx_rollout",
    metadata,
    _build_run_column(),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("row", Integer, primary_key=True, autoincrement=False),
    Column("parent_row", Integer),
    Column("tree", Integer, nullable=False),
    Column("group", Integer, nullable=False),
    Column("turn", AnyText, nullable=False),
    Column("problem_id", AnyText, nullable=False),
    Column("reward", Double),
    _build_json_column("rewards"),
    Column("advantage", Double, nullable=False),
    Column("n_tokens", Integer, nullable=False),
    Column("finish_reason", AnyText, nullable=False),
    Column("preview", AnyText, nullable=False),
    Column("failed", AnyText),
    _build_json_column("scores", nullable=True),
    Index(None, "run_id", "problem_id"),
    sqlite_with_rowid=False,
)

grouped = Table(
    "rlx_group",
    metadata,
    _build_run_column(),
    Column("name", AnyText, primary_key=True),
    Column("at", Double, nullable=False),
    Index(None, "name"),
)

# Written by earlier versions alone; a run's rows are deleted with it.
note = Table(
    "rlx_note",
    metadata,
    _build_run_column(),
    Column("note", AnyText, nullable=False),
    _build_json_column("tags"),
    Column("at", Double, nullable=False),
)

mirror = Table(
    "rlx_mirror",
    metadata,
    _build_run_column(),
    Column("target", AnyText, primary_key=True),
    Column("seq", BigInteger, nullable=False),
)

_version = Table(
    VERSION_TABLE,
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)
"""As Alembic creates it, so that a later version can migrate with Alembic."""


def create_tables(connection: Connection) -> None:
    """Creates all tables in the transaction of `connection`."""
    for tables in (metadata, _version.metadata):
        tables.create_all(connection, checkfirst=False)
    connection.execute(insert(_version).values(version_num=REVISION))


def has_tables(connection: Connection, label: str) -> bool:
    """Whether a database has the tables of a registry that this version can use.

    Raises:
        SchemaError: another version wrote it, or its `rlx_` tables have no revision.
    """
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE not in tables:
        if any(name.startswith("rlx_") for name in tables):
            raise SchemaError(f"{label} has registry tables but no revision")
        return False
    found: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    if found != REVISION:
        raise SchemaError(
            f"registry {label} is at revision {found}, and this version of rlx uses {REVISION}: "
            "read it with the version that wrote it, or set RLX_HOME to another folder"
        )
    return True


def require_tables(connection: Connection, label: str) -> None:
    """Raises NoTablesError, or SchemaError, unless this version can use the database.

    An SQLite file with tables of its own is somebody else's; one without any is a registry whose
    creation was interrupted, or is going on.
    """
    if not has_tables(connection, label):
        is_file = connection.dialect.name == "sqlite"
        is_taken = is_file and inspect(connection).get_table_names()
        fault = SchemaError if is_taken else NoTablesError
        raise fault(f"{label} is not a run registry: it has no registry tables")
