"""Compares installed packages with the tested version ranges, from package metadata alone."""

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
    """One requirement of rlx and its installed version.

    Attributes:
        name: of the distribution.
        range: versions that rlx was tested with, such as ">=2.11,<2.14"; "" for any.
        extra: the extra of rlx that requires it; "" for rlx itself.
        installed: installed version; None if it is not installed.
        fits: whether the installed version is in the range; False if it is not installed.
    """

    name: str
    range: str
    extra: str
    installed: str | None
    fits: bool

    @property
    def command(self) -> str:
        """The command that installs a version in the range."""
        return f"pip install '{self.name}{self.range}'"


@cache
def list_packages() -> Mapping[str, Package]:
    """Requirements of rlx on this platform by name, core before extras; development is left out."""
    found: dict[str, Package] = {}
    for line in requires("rlx") or ():
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        extra = _find_extra(requirement)
        if name != "rlx" and extra != "dev" and extra is not None:
            found.setdefault(name, _build_package(requirement, extra))
    return found


def _find_extra(requirement: Requirement) -> str | None:
    """The extra that has a requirement, "" for rlx itself; None if it is not for this platform."""
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
