"""Runs may belong to groups, by name; a run that two groups share belongs to both."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rlx_group",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_group_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_rlx_group")),
    )
    op.create_index(op.f("ix_rlx_group_name"), "rlx_group", ["name"])
