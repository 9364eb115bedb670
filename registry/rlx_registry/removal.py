"""Deletes runs, and the index of their rollouts, from the registry; files are the caller's."""

from sqlalchemy import delete

from rlx_registry import models
from rlx_registry.changes import record_change
from rlx_registry.registry import Registry
from rlx_registry.states import require_ended

__all__ = ["delete_rollout_records", "delete_run_records"]


def delete_run_records(registry: Registry, run_id: str) -> None:
    """Deletes every row of a run that has ended; its id is not used again.

    Raises:
        NotFoundError: there is no such run.
        ValueError: the run has not ended.
    """
    with registry.database.open_run_writer(run_id) as (connection, key):
        require_ended(connection, key)
        for table in reversed(models.metadata.sorted_tables):
            if table is not models.run and "run_id" in table.c:
                connection.execute(delete(table).where(table.c.run_id == key))
        connection.execute(delete(models.run).where(models.run.c.id == key))


def delete_rollout_records(registry: Registry, run_id: str) -> None:
    """Deletes the index of a run's rollouts, and where their bodies are.

    Raises:
        NotFoundError: there is no such run.
        ValueError: the run has not ended.
    """
    with registry.database.open_run_writer(run_id) as (connection, key):
        require_ended(connection, key)
        record_change(connection, key, "rollouts_removed")
