"""A registry in a PostgreSQL database, shared by the machines of a team.

Writers of one run are serialized by a lock on its row, submissions of one experiment by an advisory
lock; everything else is concurrent. Readers see one snapshot per transaction and cannot write.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import URL, Engine, create_engine, event, text
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NoSuchModuleError, StatementError

from rlx_registry import models
from rlx_registry.column_values import NotJsonError, encode_plain_json
from rlx_registry.errors import DatabaseUnavailableError, RegistryDatabaseError
from rlx_registry.records import HEARTBEAT_LIMIT

DRIVERS = ("postgresql", "postgresql+psycopg")
LOCK_SECONDS = 15
SESSION = f"SET lock_timeout = '{LOCK_SECONDS}s'; SET idle_in_transaction_session_timeout = '60s'"
"""Bounds every wait; a process that freezes in mid-transaction loses its locks."""
LOCKED = "55P03"
"""The server's code for a lock that was not granted in time."""
SCHEMA_LOCK = 0x726C78
"""Key of the advisory lock for creating the tables."""
CLOCKS = HEARTBEAT_LIMIT / 2
"""Largest difference in seconds between this machine's clock and the database's. Writers use their
own clocks, so a reader whose clock is off by more would report living runs as lost."""

Mode = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Postgres:
    """One PostgreSQL database."""

    url: URL

    @classmethod
    def from_url(cls, url: URL) -> "Postgres":
        """The database behind a `postgresql+psycopg://user@host/database` URL."""
        if url.drivername not in DRIVERS:
            raise DatabaseUnavailableError(
                f"the registry connects to PostgreSQL through psycopg, not {url.drivername!r}; "
                "write postgresql+psycopg://user@host/database"
            )
        if "@" in (url.host or ""):
            raise DatabaseUnavailableError(
                "the registry's URL has more than one '@': write %40 for one in a password"
            )
        return cls(url.set(drivername=DRIVERS[-1]))

    @property
    def label(self) -> str:
        """The URL for messages, without its password."""
        places = {key: self.url.query[key] for key in ("host", "port") if key in self.url.query}
        return self.url.set(query=places).render_as_string(hide_password=True)

    def engine(self, mode: Mode) -> Engine:
        """Returns an engine for reading or writing, without connecting."""
        options: dict[str, Any] = {"pool_pre_ping": True, "json_serializer": encode_plain_json}
        if mode == "read":
            options["isolation_level"] = "REPEATABLE READ"
            options["execution_options"] = {"postgresql_readonly": True}
        url = self.url.update_query_dict({"connect_timeout": "15", **dict(self.url.query)})
        try:
            engine = create_engine(url, **options)
        except (ModuleNotFoundError, NoSuchModuleError) as error:
            raise DatabaseUnavailableError(
                "a registry in PostgreSQL needs psycopg: pip install 'rlx[postgres]'"
            ) from error

        @event.listens_for(engine, "connect")
        def _configure_session(dbapi: Any, _record: object) -> None:
            dbapi.execute(SESSION)
            dbapi.commit()

        return engine

    def prepare(self, *, create: bool) -> None:
        """Creates the tables in a database that has none, if `create` is true."""
        if not create:
            return
        engine = self.engine("write")
        try:
            with engine.connect() as connection:
                if models.has_tables(connection, self.label):
                    return
            with engine.begin() as connection:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": SCHEMA_LOCK})
                if not models.has_tables(connection, self.label):
                    models.create_tables(connection)
        finally:
            engine.dispose()

    def check(self, reader: Engine) -> None:
        """Raises unless this version can use the database, and its clock is near this machine's."""
        with reader.connect() as connection:
            now = float(connection.execute(text("SELECT extract(epoch FROM now())")).scalar_one())
            models.require_tables(connection, self.label)
        ahead = time.time() - now
        if abs(ahead) > CLOCKS:
            way = "ahead of" if ahead > 0 else "behind"
            raise DatabaseUnavailableError(
                f"this machine's clock is {abs(ahead):.0f} s {way} that of registry {self.label}: "
                "synchronize it, for example with NTP"
            )

    def hold_write_turn(self) -> AbstractContextManager[None]:
        """Does nothing: the server allows concurrent writers of different runs."""
        return nullcontext()

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translates the driver's errors into the registry's."""
        try:
            yield
        except StatementError as error:
            message = " ".join(str(error.orig).split())
            refused = isinstance(error, IntegrityError | DataError)
            if getattr(error.orig, "sqlstate", None) == LOCKED:
                message = (
                    f"others have held a lock for {LOCK_SECONDS} s; one of them may be frozen: "
                    "find it in pg_stat_activity, and wake or end it"
                )
            if isinstance(error, DBAPIError) and not refused:
                raise DatabaseUnavailableError(f"registry {self.label}: {message}") from error
            raise RegistryDatabaseError(
                f"registry {self.label} rejected the record: {message}"
            ) from error
        except NotJsonError as error:
            raise RegistryDatabaseError(
                f"registry {self.label} rejected the record: {error}"
            ) from error
