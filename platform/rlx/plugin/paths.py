"""Paths that experiments name."""

import os
from pathlib import Path

__all__ = ["expand_path"]


def expand_path(path: str | Path) -> Path:
    """Returns a path with `~` or `~USER` at its start replaced by that user's home folder.

    YAML keeps the path as it is written, so that an experiment means the same for everyone who
    runs it. A path of an unknown user is returned as it is.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111  (the method raises for unknown users)
