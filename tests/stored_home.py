"""The home that an earlier version of rlx wrote, moved to where a test runs."""

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

STORED = Path(__file__).parent / "run" / "stored" / "home_550b2e0.tar.xz"
WRITTEN_AT = "/tmp/past_home"


def unpack_home(folder: Path) -> Path:
    """Unpacks it below a folder; returns RLX_HOME."""
    home = folder / "home"
    with tarfile.open(STORED) as archive:
        archive.extractall(folder, filter="data")
    with closing(sqlite3.connect(home / "registry.db")) as database, database:
        database.execute(
            "UPDATE rlx_run SET directory = replace(directory, ?, ?)", (WRITTEN_AT, str(home))
        )
    for journal in home.glob("runs/*/journal.jsonl"):
        journal.write_text(journal.read_text().replace(WRITTEN_AT, str(home)))
    return home
