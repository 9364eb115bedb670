"""What code is: a digest over the Python files that it is made of."""

import hashlib
from pathlib import Path

__all__ = ["source_digest"]


def source_digest(file: Path) -> str:
    """SHA-256 over a module's file, or over every `.py` file of the package whose `__init__.py` it
    is, names included."""
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    for source in files:
        digest.update(source.relative_to(file.parent).as_posix().encode() + b"\0")
        digest.update(source.read_bytes() + b"\0")
    return digest.hexdigest()
