"""What plugins of other libraries share: the import where it is needed, and how problems split."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic import Field

from rlx.plugin import Plugin, Problem, Split

ATTEMPTS = 1000
"""Candidates for a problem, of which the first of its split is taken."""
_MISSING = "needs the package `{0}`: pip install 'rlx[gyms]'"


class NeedsLibrary(Plugin):
    """Base of plugins that need a library of the extra `gyms`."""

    library: ClassVar[str]
    """The module to import."""

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


class GymTask(Plugin):
    """Base of tasks whose problems come from a library; a hash of what one shows is its split.

    Subclasses implement `list_candidates`, at most `ATTEMPTS` texts and problems.
    """

    config: Mapping[str, Any] = Field(default_factory=dict)
    """Options of what the library makes, as it documents them."""
    held_out: int = Field(3, ge=2)
    """One in `held_out` problems is held out for testing."""

    @property
    def config_text(self) -> str:
        return json.dumps(dict(self.config), sort_keys=True)

    def list_candidates(self, split: Split, index: int, seed: int) -> Iterator[tuple[str, Problem]]:
        raise NotImplementedError

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        for shown, problem in self.list_candidates(split, index, seed):
            if is_of_split(split, shown, self.held_out):
                return problem
        raise ValueError(
            f"too few problems: none of {ATTEMPTS} is for the split {split!r} with "
            f"held_out: {self.held_out}"
        )

    def lesson(self, index: int, seed: int) -> Problem:
        return self.problem("train", index, seed)


def is_of_split(split: Split, shown: str, held_out: int) -> bool:
    """Whether a problem that shows this text is of a split."""
    return (zlib.crc32(shown.encode()) % held_out == 0) == (split == "test")


def suggest_name(word: str, choices: Sequence[str], otherwise: str) -> str:
    near = get_close_matches(word, choices, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def is_installed(module: str) -> bool:
    """Whether a library can be imported; imports nothing."""
    return find_spec(module) is not None


def import_library(module: str) -> Any:
    """Returns a library of the extra `gyms`; raises ImportError where it is missing."""
    if not is_installed(library := module.partition(".")[0]):
        raise ImportError(_MISSING.format(library))
    return import_module(module)
