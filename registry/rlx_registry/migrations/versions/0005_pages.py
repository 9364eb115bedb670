"""What pages show: where each value of an experiment comes from, how plugins fare, one problem."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

PLACE = ("host", "kind", "distribution", "name")


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"  # which would put it behind the constraints
    with op.batch_alter_table(
        "rlx_run",
        recreate="always" if sqlite else "never",
        table_kwargs={"sqlite_autoincrement": True},
    ) as batch:
        batch.add_column(sa.Column("origins", sa.JSON(none_as_null=True)))
    op.create_table(
        "rlx_plugin",
        *(sa.Column(name, sa.Text(), nullable=False) for name in PLACE),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("entry_point", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint(*PLACE, name=op.f("pk_rlx_plugin")),
        sa.CheckConstraint("state IN ('ok', 'broken', 'clash')", name=op.f("ck_rlx_plugin_state")),
    )
    op.create_index(
        op.f("ix_rlx_rollout_run_id_problem_id"), "rlx_rollout", ["run_id", "problem_id"]
    )
