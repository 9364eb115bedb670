"""Rows of rollouts get their scores; those that are there already have none."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

WITHOUT_ROWID: Mapping[str, Any] = {"sqlite_with_rowid": False}


def upgrade() -> None:
    with op.batch_alter_table(
        "rlx_rollout", recreate="always", table_kwargs=WITHOUT_ROWID
    ) as batch:
        batch.add_column(sa.Column("scores", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table(
        "rlx_rollout", recreate="always", table_kwargs=WITHOUT_ROWID
    ) as batch:
        batch.drop_column("scores")
