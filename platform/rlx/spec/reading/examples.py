"""Finds the experiments that rlx ships."""

from importlib.resources import files
from pathlib import Path

__all__ = ["find_examples"]

_SOURCES = "experiments"
"""Folder of the examples in a checkout; a wheel has them in the package."""


def find_examples() -> dict[str, Path]:
    """Returns the file of each shipped experiment by its name."""
    package = Path(str(files("rlx")))
    folder = package / "examples"
    if not folder.is_dir():
        folder = package.parents[1] / _SOURCES
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
