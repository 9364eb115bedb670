"""The home that an earlier version of rlx wrote, moved to where a test runs."""

import tarfile
from pathlib import Path

STORED = Path(__file__).parent / "stored" / "home_550b2e0.tar.xz"


def unpack_home(folder: Path) -> Path:
    """Unpacks it below a folder; returns RLX_HOME. Its registry still names its former place."""
    with tarfile.open(STORED) as archive:
        archive.extractall(folder, filter="data")
    return folder / "home"
