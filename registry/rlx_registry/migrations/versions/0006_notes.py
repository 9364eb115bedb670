"""People write a note on a run and give it tags."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rlx_note",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("tags", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_note_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_rlx_note")),
    )
