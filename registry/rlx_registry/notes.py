"""Notes and tags that people give to runs."""

from collections.abc import Iterable

from sqlalchemy import select

from rlx_registry import models
from rlx_registry.changes import record_change
from rlx_registry.database import Database, format_run_id
from rlx_registry.records import RunNote

__all__ = ["Notes"]


class Notes:
    """The notes and tags of one registry's runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def write(self, run_id: str, note: str, tags: Iterable[str]) -> None:
        """Replaces a run's note and its tags; a repeated tag counts once."""
        kept = list(dict.fromkeys(tags))
        with self._database.open_run_writer(run_id) as (connection, key):
            record_change(connection, key, "noted", note=note, tags=kept)

    def read(self, run_id: str) -> RunNote:
        """Returns a run's note and tags; an empty note if nobody wrote one."""
        c = models.note.c
        query = select(c.note, c.tags, c.at)
        with self._database.open_run_reader(run_id) as (connection, key):
            row = connection.execute(query.where(c.run_id == key)).one_or_none()
            return RunNote() if row is None else RunNote(row.note, tuple(row.tags), row.at)

    def read_all(self) -> dict[str, RunNote]:
        """Returns the notes of all runs that have one, by run id."""
        c = models.note.c
        with self._database.open_reader() as connection:
            rows = connection.execute(select(c.run_id, c.note, c.tags, c.at).order_by(c.run_id))
            return {format_run_id(r.run_id): RunNote(r.note, tuple(r.tags), r.at) for r in rows}
