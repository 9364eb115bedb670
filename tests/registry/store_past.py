"""Stores a registry of the newest revision in tests/registry/past, for the versions to come.

    python tests/registry/store_past.py

Say so once when a revision has been added; a test asks for the files. Needs PostgreSQL.
"""

import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from filled import fill
from postgres import PASSWORD, binaries, server
from schemas import stored

from rlx_registry import Registry, schema

HOME = Path("/srv/rlx")
NOISE = re.compile(r"^(--|SET |SELECT pg_catalog.set_config|\\)|^$")


def main() -> None:
    revision = schema.REVISIONS[-1]
    stored(revision, "sqlite").write_text(from_sqlite())
    stored(revision, "postgresql").write_text(from_postgres())
    print(f"stored revision {revision} in {stored(revision, 'sqlite').parent}")


def from_sqlite() -> str:
    with tempfile.TemporaryDirectory() as folder:
        with Registry.open(f"sqlite:///{folder}/registry.db") as registry:
            fill(registry, HOME)
        raw = sqlite3.connect(f"{folder}/registry.db")
        try:
            return "\n".join(raw.iterdump()) + "\n"
        finally:
            raw.close()


def from_postgres() -> str:
    with server() as running:
        database = running.create()
        with Registry.open(running.url(database)) as registry:
            fill(registry, HOME)
        command = [str(binaries() / "pg_dump"), "--inserts", "--no-owner", "--no-privileges"]
        command += [f"--host={running.folder}", "--username=rlx", database]
        secret = {**os.environ, "PGPASSWORD": PASSWORD}
        done = subprocess.run(command, env=secret, check=True, capture_output=True, text=True)
    return without_noise(done.stdout)


def without_noise(dump: str) -> str:
    """Leaves out comments, settings and commands of psql; no stored text has such lines."""
    return "".join(line + "\n" for line in dump.splitlines() if not NOISE.match(line))


if __name__ == "__main__":
    main()
