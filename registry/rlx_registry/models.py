"""The tables, as the newest migration leaves them.

Every table has the prefix `rlx_`, every constraint a name: the registry may share a database, and
unnamed constraints cannot be altered later. Runs are integers here and "r-0001" outside.
"""

from collections.abc import Iterable

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
)

from rlx_registry.records import LABELS, STATUSES

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

VERSION_TABLE = "rlx_alembic_version"


def _one_of(column: str, values: Iterable[str]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


def _json(name: str, *, nullable: bool = False) -> "Column[object]":
    return Column(name, JSON(none_as_null=True), nullable=nullable)


def _of_run() -> "Column[int]":
    return Column("run_id", ForeignKey("rlx_run.id"), primary_key=True)


run = Table(
    "rlx_run",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("step", Integer, nullable=False, default=0),
    Column("steps_total", Integer),
    Column("created", Double, nullable=False),
    Column("started", Double),
    Column("ended", Double),
    Column("reason", Text),
    Column("directory", Text),
    Column("mlflow_run_id", Text),
    Column("mlflow_experiment_id", Text),
    Column("attempt", Integer, nullable=False, default=0),
    Column("heartbeat", Double),
    Column("pid", Integer),
    Column("phase", Text),
    Column("yaml", Text, nullable=False),
    _json("spec"),
    _json("plugins"),
    _json("code"),
    _json("environment"),
    _one_of("status", STATUSES),
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
    Column("before", Text),
    Column("after", Text, nullable=False),
    Column("reason", Text),
    Column("attempt", Integer, nullable=False),
    _one_of("before", STATUSES),
    _one_of("after", STATUSES),
    Index(None, "run_id"),
)

event = Table(
    "rlx_event",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("rlx_run.id"), nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("level", Text, nullable=False),
    Column("message", Text, nullable=False),
    _json("payload", nullable=True),
    Index(None, "run_id", "id"),
    sqlite_autoincrement=True,
)

metric_key = Table(
    "rlx_metric_key",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
)

metric = Table(
    "rlx_metric",
    metadata,
    _of_run(),
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
    _of_run(),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("label", Text, primary_key=True),
    Column("suite", Text, primary_key=True),
    Column("n", Integer, nullable=False),
    _json("metrics"),
    _json("payload", nullable=True),
    Column("at", Double, nullable=False),
    _one_of("label", LABELS),
)

checkpoint = Table(
    "rlx_checkpoint",
    metadata,
    _of_run(),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("path", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("at", Double, nullable=False),
)

artifact = Table(
    "rlx_artifact",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("run_id", ForeignKey("rlx_run.id"), nullable=False),
    Column("path", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("at", Double, nullable=False),
    Index(None, "run_id", "path", unique=True),
    sqlite_autoincrement=True,
)

rollout_step = Table(
    "rlx_rollout_step",
    metadata,
    _of_run(),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("path", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    _json("statistics"),
    Column("at", Double, nullable=False),
)

rollout = Table(
    "rlx_rollout",
    metadata,
    _of_run(),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("row", Integer, primary_key=True, autoincrement=False),
    Column("parent_row", Integer),
    Column("tree", Integer, nullable=False),
    Column("group", Integer, nullable=False),
    Column("turn", Text, nullable=False),
    Column("problem_id", Text, nullable=False),
    Column("reward", Double),
    _json("rewards"),
    Column("advantage", Double, nullable=False),
    Column("n_tokens", Integer, nullable=False),
    Column("finish_reason", Text, nullable=False),
    Column("preview", Text, nullable=False),
    Column("failed", Text),
    _json("scores", nullable=True),
    sqlite_with_rowid=False,
)

mirror = Table(
    "rlx_mirror",
    metadata,
    _of_run(),
    Column("target", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False),
)
