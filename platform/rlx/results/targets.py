"""What is evaluated, probed or rescored: a run or a model. Imports no torch."""

from collections.abc import Collection, Iterable
from typing import Protocol

from rlx.errors import SpecError
from rlx.launch import get_registry_url
from rlx.text import escape_unprintable


class OpenedRun(Protocol):
    """A run with its registry, such as `rlx.Run`."""

    @property
    def id(self) -> str: ...
    @property
    def registry(self) -> str: ...


def locate_target(target: str | OpenedRun, registry: str | None) -> tuple[str, str]:
    """Returns the name of a target, and the URL of the registry to look in."""
    if isinstance(target, str):
        return target, get_registry_url(registry)
    if hasattr(target, "id") and hasattr(target, "registry"):
        return target.id, target.registry
    raise SpecError("the target is a run, its name, or a model's folder or name, as text")


def check_sections(overrides: Iterable[str], free: Collection[str], reason: str) -> None:
    """Raises SpecError, which ends with `reason`, if an override changes another section than
    `free`."""
    fixed = sorted({o for o in overrides if o.partition("=")[0].split(".")[0] not in free})
    if fixed:
        raise SpecError(f"--set {escape_unprintable(fixed[0])}: {reason}")
