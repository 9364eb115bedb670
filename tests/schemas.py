"""Registries as databases: what their tables hold and how they are made, and past ones stored."""

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import MetaData, create_engine, text
from sqlalchemy.engine import make_url

from rlx_registry.models import VERSION_TABLE

__all__ = ["kind_of", "load", "rows", "stored", "structure"]

PAST = Path(__file__).parent / "registry" / "past"

POSTGRES = (
    "SELECT table_name, column_name, data_type, is_nullable FROM information_schema.columns "
    "WHERE table_name LIKE 'rlx_%'",
    "SELECT tablename, indexname, indexdef, '' FROM pg_indexes WHERE tablename LIKE 'rlx_%'",
    "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid), '' FROM pg_constraint "
    "WHERE conrelid::regclass::text LIKE 'rlx_%'",
    "SELECT sequencename, data_type::text, '', '' FROM pg_sequences "
    "WHERE sequencename LIKE 'rlx_%'",
)
SQLITE = (
    "SELECT type, name, sql FROM sqlite_master WHERE tbl_name LIKE 'rlx_%' "
    f"AND tbl_name != '{VERSION_TABLE}'"
)


def kind_of(url: str) -> str:
    """Returns "sqlite" or "postgresql"."""
    return make_url(url).get_backend_name()


def stored(revision: str, kind: str) -> Path:
    """The file that holds a registry of a revision as the code of that time wrote it."""
    return PAST / f"{revision}.{kind}.sql"


def load(url: str, revision: str) -> None:
    """Makes the stored registry of a revision in an empty database."""
    script = stored(revision, kind_of(url)).read_text()
    if kind_of(url) == "sqlite":
        path = Path(str(make_url(url).database))
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = sqlite3.connect(path)
        raw.executescript(script)
        raw.close()
        return
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.connection.cursor().execute(script)
    engine.dispose()


def rows(url: str) -> dict[str, list[dict[str, Any]]]:
    """Returns every row of every table of a registry, by its columns, in the order of keys."""
    engine, metadata = create_engine(url), MetaData()
    with engine.connect() as connection:
        metadata.reflect(connection, only=lambda name, _: name.startswith("rlx_"))
        found = {
            table.name: [
                dict(row._mapping)
                for row in connection.execute(table.select().order_by(*table.primary_key))
            ]
            for table in metadata.sorted_tables
        }
    engine.dispose()
    return found


def structure(url: str) -> object:
    """Returns tables, columns, constraints and indices of a registry, to be compared."""
    engine = create_engine(url)
    with engine.connect() as connection:
        if kind_of(url) == "postgresql":
            found = sorted(
                tuple(row) for query in POSTGRES for row in connection.execute(text(query))
            )
        else:
            found = _plain(connection.execute(text(SQLITE)).all())
    engine.dispose()
    return found


def _plain(described: Any) -> dict[tuple[str, str], list[str]]:
    """Sorts the lines of each table: the order of its constraints means nothing, nor do the quotes
    that SQLite puts around the name of a table that was rebuilt."""
    return {
        (kind, name): sorted(
            line.strip().rstrip(",").replace('"', "") for line in (sql or "").splitlines()
        )
        for kind, name, sql in described
    }
