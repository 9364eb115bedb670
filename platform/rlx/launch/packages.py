"""Installed packages against the ranges that rlx was tested with, from metadata alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["Package", "list_packages"]


@dataclass(frozen=True, slots=True)
class Package:
    """One requirement of rlx and what is installed of it.

    Attributes:
        name: of the distribution.
        range: versions that rlx was tested with, such as ">=2.11,<2.14"; "" for any.
        extra: the optional part of rlx that wants it; "" for rlx itself.
        installed: version, or None.
        fits: whether the installed version lies in the range; False where there is none.
    """

    name: str
    range: str
    extra: str
    installed: str | None
    fits: bool

    @property
    def command(self) -> str:
        """What installs a version that fits."""
        return f"pip install '{self.name}{self.range}'"


@cache
def list_packages() -> Mapping[str, Package]:
    """Every requirement of rlx on this platform, its own first; those for development left out."""
    found: dict[str, Package] = {}
    for line in requires("rlx") or ():
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        extra = _find_extra(requirement)
        if name != "rlx" and extra != "dev" and extra is not None:
            found.setdefault(name, _build_package(requirement, extra))
    return found


def _find_extra(requirement: Requirement) -> str | None:
    """The extra that wants a requirement; None where this platform does not."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return ""
    named = re.search(r"extra == ['\"]([^'\"]+)", str(marker))
    return named[1] if named and marker.evaluate({"extra": named[1]}) else None


def _build_package(requirement: Requirement, extra: str) -> Package:
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        installed = None
    fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
    return Package(requirement.name, str(requirement.specifier), extra, installed, fits)
