"""Imports libraries of the extra `gyms` where they are needed."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["import_library", "is_installed", "require_library"]


def is_installed(module: str) -> bool:
    """Whether a library can be imported; imports nothing."""
    return find_spec(module) is not None


def require_library(module: str) -> None:
    """Checks that a library of the extra `gyms` is installed.

    Raises:
        ImportError: it is missing.
    """
    if not is_installed(module):
        raise ImportError(f"needs the package `{module}`: pip install 'rlx[gyms]'")


def import_library(module: str) -> Any:
    """Returns a library of the extra `gyms`.

    Raises:
        ImportError: it is missing.
    """
    require_library(module.partition(".")[0])
    return import_module(module)
