"""The first schema: runs, their history, and what they report."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rlx_metric_key",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rlx_metric_key")),
        sa.UniqueConstraint("name", name=op.f("uq_rlx_metric_key_name")),
    )
    op.create_table(
        "rlx_run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("steps_total", sa.Integer(), nullable=True),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("started", sa.Double(), nullable=True),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("directory", sa.Text(), nullable=True),
        sa.Column("mlflow_run_id", sa.Text(), nullable=True),
        sa.Column("mlflow_experiment_id", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("heartbeat", sa.Double(), nullable=True),
        sa.Column("pid", sa.Integer(), nullable=True),
        sa.Column("phase", sa.Text(), nullable=True),
        sa.Column("yaml", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("plugins", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("code", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("environment", sa.JSON(none_as_null=True), nullable=False),
        sa.CheckConstraint(
            "status IN ('submitted', 'running', 'finished', 'failed', 'stopped', 'lost')",
            name=op.f("ck_rlx_run_status"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rlx_run")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_rlx_run_digest_seed"), "rlx_run", ["digest", "seed"])
    op.create_index(op.f("ix_rlx_run_name"), "rlx_run", ["name"])

    op.create_table(
        "rlx_artifact",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_artifact_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_rlx_artifact")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_rlx_artifact_run_id_path"), "rlx_artifact", ["run_id", "path"], unique=True
    )

    op.create_table(
        "rlx_checkpoint",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_checkpoint_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_rlx_checkpoint")),
    )
    op.create_table(
        "rlx_evaluation",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("suite", sa.Text(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("payload", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "label IN ('before', 'after', 'step')", name=op.f("ck_rlx_evaluation_label")
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_evaluation_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("run_id", "step", "label", "suite", name=op.f("pk_rlx_evaluation")),
    )
    op.create_table(
        "rlx_event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("payload", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_event_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rlx_event")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_rlx_event_run_id_id"), "rlx_event", ["run_id", "id"])

    op.create_table(
        "rlx_metric",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["key_id"], ["rlx_metric_key.id"], name=op.f("fk_rlx_metric_key_id_rlx_metric_key")
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_metric_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("run_id", "key_id", "step", name=op.f("pk_rlx_metric")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_rlx_metric_run_id_seq"), "rlx_metric", ["run_id", "seq"], unique=True)

    op.create_table(
        "rlx_mirror",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_mirror_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("run_id", "target", name=op.f("pk_rlx_mirror")),
    )
    op.create_table(
        "rlx_rollout",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("row", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_row", sa.Integer(), nullable=True),
        sa.Column("tree", sa.Integer(), nullable=False),
        sa.Column("group", sa.Integer(), nullable=False),
        sa.Column("turn", sa.Text(), nullable=False),
        sa.Column("problem_id", sa.Text(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("rewards", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("advantage", sa.Double(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("preview", sa.Text(), nullable=False),
        sa.Column("failed", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_rollout_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("run_id", "step", "row", name=op.f("pk_rlx_rollout")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "rlx_rollout_step",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("statistics", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_rollout_step_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_rlx_rollout_step")),
    )
    op.create_table(
        "rlx_status_change",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "after IN ('submitted', 'running', 'finished', 'failed', 'stopped', 'lost')",
            name=op.f("ck_rlx_status_change_after"),
        ),
        sa.CheckConstraint(
            "before IN ('submitted', 'running', 'finished', 'failed', 'stopped', 'lost')",
            name=op.f("ck_rlx_status_change_before"),
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["rlx_run.id"], name=op.f("fk_rlx_status_change_run_id_rlx_run")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rlx_status_change")),
    )
    op.create_index(op.f("ix_rlx_status_change_run_id"), "rlx_status_change", ["run_id"])


def downgrade() -> None:
    for table in (
        "rlx_status_change",
        "rlx_rollout_step",
        "rlx_rollout",
        "rlx_mirror",
        "rlx_metric",
        "rlx_event",
        "rlx_evaluation",
        "rlx_checkpoint",
        "rlx_artifact",
        "rlx_run",
        "rlx_metric_key",
    ):
        op.drop_table(table)
