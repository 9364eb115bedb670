"""Rows of rollouts get their scores; those that are there already have none."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

WITHOUT_ROWID: Mapping[str, Any] = {"sqlite_with_rowid": False}


def _rollouts() -> AbstractContextManager[Any]:
    """The table, to be changed: SQLite builds it anew, other databases change it in place."""
    anew: Literal["always", "never"] = (
        "always" if op.get_bind().dialect.name == "sqlite" else "never"
    )
    return op.batch_alter_table("rlx_rollout", recreate=anew, table_kwargs=WITHOUT_ROWID)


def upgrade() -> None:
    with _rollouts() as batch:
        batch.add_column(sa.Column("scores", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    with _rollouts() as batch:
        batch.drop_column("scores")
