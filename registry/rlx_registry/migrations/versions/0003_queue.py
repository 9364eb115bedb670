"""Runs may wait for a worker, be asked to stop, and hold devices of a machine."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

STATUSES = {
    "rlx_run": ("status",),
    "rlx_status_change": ("before", "after"),
}
BEFORE = "'submitted', 'running', 'finished', 'failed', 'stopped', 'lost'"
NOW = f"'queued', {BEFORE}"
OPTIONS: dict[str, dict[str, Any]] = {
    "rlx_run": {"sqlite_autoincrement": True},  # which SQLite does not tell of an old table
    "rlx_status_change": {},
}


def _restate(table: str, values: str, *more: sa.Column[Any]) -> None:
    """Changes what the columns of status may hold, and adds columns.

    SQLite cannot change a constraint: the table is built anew, without the old ones.
    """
    sqlite = op.get_bind().dialect.name == "sqlite"
    with op.batch_alter_table(
        table, recreate="always" if sqlite else "never", table_kwargs=OPTIONS[table]
    ) as batch:
        for column in more:
            batch.add_column(column)
        for name in STATUSES[table]:
            constraint = op.f(f"ck_{table}_{name}")
            if not sqlite:
                batch.drop_constraint(constraint, type_="check")
            batch.create_check_constraint(constraint, f"{name} IN ({values})")
        if more:
            batch.create_check_constraint(
                op.f(f"ck_{table}_request"), "request IN ('stop', 'kill')"
            )


def upgrade() -> None:
    host, request = sa.Column("host", sa.Text()), sa.Column("request", sa.Text())
    _restate("rlx_run", NOW, host, request)
    _restate("rlx_status_change", NOW)
    op.create_table(
        "rlx_device",
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_device_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("host", "name", name=op.f("pk_rlx_device")),
    )
