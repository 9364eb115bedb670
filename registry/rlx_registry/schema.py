"""The schema's revisions: which one a database is at, and the way to the newest.

The tables carry the prefix `rlx_` and so does Alembic's own, so a registry may share a database
with others. Alembic is imported only where there is something to do: it costs half a second.
"""

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from rlx_registry.errors import SchemaError
from rlx_registry.models import VERSION_TABLE

__all__ = ["MIGRATIONS", "REVISIONS", "check_schema_revision", "find_revision", "upgrade_schema"]

REVISIONS = ("0001", "0002", "0003", "0004", "0005")
"""Revisions this code knows, oldest first; the last is the one it uses."""

MIGRATIONS = Path(__file__).parent / "migrations"


def find_revision(connection: Connection, label: str) -> str | None:
    """Returns the revision a database is at; None for one without a registry.

    Args:
        label: the database as messages name it.

    Raises:
        SchemaError: a newer version wrote it, or its tables are not of a registry.
    """
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE not in tables:
        if any(name.startswith("rlx_") for name in tables):
            raise SchemaError(f"{label} has tables of a registry but no revision")
        return None
    found: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    if found is not None and found not in REVISIONS:
        raise SchemaError(
            f"registry {label} is at revision {found}, which a newer version of rlx wrote; "
            f"this one knows up to {REVISIONS[-1]}"
        )
    return found


def check_schema_revision(engine: Engine, label: str, remedy: str) -> None:
    """Sees that a database is one that this code can use.

    Args:
        remedy: what upgrades an older one.

    Raises:
        SchemaError: it is newer, older, or not a registry.
    """
    with engine.connect() as connection:
        found = find_revision(connection, label)
    if found is None:
        raise SchemaError(f"{label} is no registry of runs: it has none of the tables of one")
    if found != REVISIONS[-1]:
        raise SchemaError(
            f"registry {label} is at revision {found}, this version reads {REVISIONS[-1]}; {remedy}"
        )


def upgrade_schema(connection: Connection) -> None:
    """Makes or changes the tables, inside the transaction of `connection`."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
