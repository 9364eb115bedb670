"""A PostgreSQL server of the tests' own, from the system's binaries; it lives in one folder."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from patience import stop_process, wait_until
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

PASSWORD = "s3cr3t"
"""Of the server's user `rlx`; it must never be seen in any output."""

GRACE = 30
"""Seconds until a server that does not stop is made to."""


class Server:
    """A running server; databases are made in it as they are needed."""

    def __init__(self, folder: Path, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.folder = folder
        self._numbers = count(1)
        self._start = start
        self.start()

    def start(self) -> None:
        """Begins, or begins again, and waits until clients are served."""
        self._process = self._start()
        wait_until("PostgreSQL to serve", self._is_serving)

    def _is_serving(self) -> bool:
        try:
            self.execute("postgres", "SELECT 1")
        except OperationalError:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            return False
        return True

    def stop(self, number: int = signal.SIGINT) -> None:
        """Ends, its clients cut off, or by SIGTERM once they have left."""
        self._process.send_signal(number)
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            stop_process(self._process, signal.SIGQUIT)

    def url(self, database: str, password: str = PASSWORD) -> str:
        """The URL of a database, through the server's socket."""
        return f"postgresql+psycopg://rlx:{password}@/{database}?host={self.folder}"

    def create(self, template: str = "template0") -> str:
        """Makes a database, empty or as another is, and returns its name."""
        name = f"test{next(self._numbers)}"
        self.execute("postgres", f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def execute(self, database: str, sql: str) -> list[tuple[object, ...]]:
        """Runs statements, each on its own, and returns the rows of a query."""
        engine = create_engine(self.url(database), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                result = connection.execute(text(sql))
                return [tuple(row) for row in result] if result.returns_rows else []
        finally:
            engine.dispose()


def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`, the newest where there are several."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[4]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


@contextmanager
def server(settings: Sequence[str] = ("fsync=off",)) -> Iterator[Server]:
    """Runs a server until the block ends.

    Without PostgreSQL the tests that ask are skipped; with RLX_CI=1 they fail.
    """
    where = binaries()
    if where is None:
        said = "PostgreSQL is not installed: apt-get install postgresql"
        if os.environ.get("RLX_CI") == "1":
            pytest.fail(said)
        pytest.skip(said)
    # Not below pytest's folder: its path may be too long for a socket, and closed to others.
    with tempfile.TemporaryDirectory(prefix="rlx-pg-") as name:
        folder = Path(name)
        # PostgreSQL refuses to run as root; its package has made a user for it.
        user = "postgres" if os.geteuid() == 0 else None
        if user is not None:
            shutil.chown(folder, user)
        making, serving = _commands(where, folder, settings)
        assert _run(making, folder, user).wait() == 0, (folder / "log").read_text()
        running = Server(folder, lambda: _run(serving, folder, user))
        try:
            yield running
        finally:
            running.stop(signal.SIGTERM)


def _run(command: list[str], folder: Path, user: str | None) -> subprocess.Popen[bytes]:
    extra = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, **extra)


def _commands(where: Path, folder: Path, settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """What makes the server's data, and what serves them."""
    secret, data = folder / "password", folder / "data"
    secret.write_text(PASSWORD)
    secret.chmod(0o644)
    making = [str(where / "initdb"), "--pgdata", str(data), "--username=rlx", "--encoding=UTF8"]
    making += ["--auth=scram-sha-256", f"--pwfile={secret}", "--no-locale", "--no-sync"]
    options = ["listen_addresses=", f"unix_socket_directories={folder}", *settings]
    serving = [str(where / "postgres"), "-D", str(data)]
    return making, serving + [part for option in options for part in ("-c", option)]
