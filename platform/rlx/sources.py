"""Digest of the Python source files of a module or package."""

import hashlib
from pathlib import Path

__all__ = ["source_digest"]


def source_digest(file: Path) -> str:
    """SHA-256 of a module's file; for an `__init__.py`, of every `.py` file of its package,
    including the file names."""
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    for source in files:
        digest.update(source.relative_to(file.parent).as_posix().encode() + b"\0")
        digest.update(source.read_bytes() + b"\0")
    return digest.hexdigest()
