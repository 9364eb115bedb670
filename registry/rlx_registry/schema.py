"""Creates the tables of a database; reads, checks and upgrades its schema revision.

All tables, including Alembic's own, have the prefix `rlx_`, so a registry may share a database.
Alembic is imported only to upgrade tables, because its import takes half a second: new ones are
created as `models` describes them, not by one migration after the other.
"""

from pathlib import Path

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    insert,
    inspect,
    text,
)

from rlx_registry.errors import NoTablesError, OldSchemaError, SchemaError
from rlx_registry.models import VERSION_TABLE, metadata

__all__ = [
    "MIGRATIONS",
    "REVISIONS",
    "check_schema_revision",
    "create_schema",
    "find_revision",
    "upgrade_schema",
]

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006")
"""Revisions known to this version, oldest first; it uses the last one."""

MIGRATIONS = Path(__file__).parent / "migrations"

_version = Table(
    VERSION_TABLE,
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)
"""As Alembic itself would create it."""


def find_revision(connection: Connection, label: str) -> str | None:
    """Returns the revision of a database; None if it has no registry.

    Args:
        label: the database's name in messages.

    Raises:
        SchemaError: a newer version wrote it, or its `rlx_` tables have no revision.
    """
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE not in tables:
        if any(name.startswith("rlx_") for name in tables):
            raise SchemaError(f"{label} has registry tables but no revision")
        return None
    found: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    if found is not None and found not in REVISIONS:
        raise SchemaError(
            f"registry {label} is at revision {found}, which a newer version of rlx wrote; "
            f"this one knows up to {REVISIONS[-1]}"
        )
    return found


def check_schema_revision(engine: Engine, label: str, remedy: str) -> None:
    """Checks that a database has the revision that this version uses.

    Args:
        remedy: how to upgrade an older database, for the message.

    Raises:
        OldSchemaError: the database is older.
        SchemaError: it is newer, or not a registry.
    """
    with engine.connect() as connection:
        found = find_revision(connection, label)
    if found is None:
        raise NoTablesError(f"{label} is not a run registry: it has no registry tables")
    if found != REVISIONS[-1]:
        raise OldSchemaError(
            f"registry {label} is at revision {found}, this version reads {REVISIONS[-1]}; {remedy}"
        )


def create_schema(connection: Connection) -> None:
    """Creates the tables of the newest revision in the transaction of `connection`."""
    for tables in (metadata, _version.metadata):
        tables.create_all(connection, checkfirst=False)
    connection.execute(insert(_version).values(version_num=REVISIONS[-1]))


def upgrade_schema(connection: Connection) -> None:
    """Upgrades the tables in the transaction of `connection`, by migrations."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
