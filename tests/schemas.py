"""The tables of a registry as a database describes them."""

from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from rlx_registry.models import VERSION_TABLE

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
