"""Imports libraries of the extra `gyms` where they are needed."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from typing import Any, ClassVar

from rlx.plugin import Plugin

_MISSING = "needs the package `{0}`: pip install 'rlx[gyms]'"


class NeedsLibrary(Plugin):
    """Base of plugins that need a library of the extra `gyms`.

    Attributes:
        library: the module to import.
    """

    library: ClassVar[str]

    def __setstate__(self, state: dict[Any, Any]) -> None:
        # Runs in a worker: the import must not count against the deadline of the first call.
        super().__setstate__(state)
        if is_installed(self.library):
            import_library(self.library)

    def check(self) -> None:
        if not is_installed(self.library):
            raise ImportError(_MISSING.format(self.library))

    def data(self) -> Mapping[str, str]:
        """Returns the library's version: its problems and worlds are part of it."""
        return {self.library: _find_version(self.library)}


@cache
def _find_version(module: str) -> str:
    return version(packages_distributions().get(module, [module])[0])


def is_installed(module: str) -> bool:
    """Whether a library can be imported; imports nothing."""
    return find_spec(module) is not None


def import_library(module: str) -> Any:
    """Returns a library of the extra `gyms`; raises ImportError where it is missing."""
    if not is_installed(library := module.partition(".")[0]):
        raise ImportError(_MISSING.format(library))
    return import_module(module)
