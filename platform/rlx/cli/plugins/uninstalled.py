"""Makes a distribution importable temporarily without installing it: a folder or a wheel.

Nothing is built or downloaded. A wheel is unpacked. For a folder, the metadata of an installation
is written to a temporary folder, and its modules are imported in place.
"""

import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rlx.discovery import GROUPS
from rlx.errors import PluginError, SpecError
from rlx.text import escape_unprintable

__all__ = ["add_to_sys_path"]

_ROOTS = ("src", ".")
"""Folders of a distribution that may hold its modules."""


@contextmanager
def add_to_sys_path(path: Path) -> Iterator[str]:
    """Puts a distribution at the front of `sys.path` and yields its name.

    Args:
        path: a wheel, or a folder with a `pyproject.toml`.

    Raises:
        SpecError: the path is neither.
        PluginError: it offers no plugin, or its modules are not where rlx looks for them.
    """
    before = list(sys.path)
    with tempfile.TemporaryDirectory(prefix="rlx-check-") as folder:
        there = Path(folder)
        try:
            if path.is_dir():
                sys.path[:0] = [folder, *_write_distribution_metadata(path, there)]
            else:
                _unzip_wheel(path, there)
                sys.path.insert(0, folder)
            (found,) = distributions(path=[folder])
            offered = [p for p in found.entry_points if p.group in GROUPS.values()]
            if not offered:
                groups = ", ".join(GROUPS.values())
                raise PluginError(
                    f"{_format_printable_path(path)} provides no plugin: no entry point under "
                    f"{groups}"
                )
            _require_named_packages({p.value for p in offered}, path)
            yield found.name
        finally:
            sys.path[:] = before


def _unzip_wheel(wheel: Path, there: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(there)
    except (OSError, zipfile.BadZipFile) as error:
        raise SpecError(
            f"cannot read {_format_printable_path(wheel)} as a wheel: {error}"
        ) from error
    if len(list(there.glob("*.dist-info"))) != 1:
        raise SpecError(
            f"{_format_printable_path(wheel)} is not a wheel: it has no .dist-info folder"
        )


def _write_distribution_metadata(folder: Path, there: Path) -> list[str]:
    """Writes the metadata of a distribution's folder; returns the folders with its modules."""
    project = _read_project_table(folder)
    name, version = str(project.get("name", folder.name)), str(project.get("version", "0"))
    info = there / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    lines = []
    for group, points in dict(project.get("entry-points", {})).items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [str((folder / root).resolve()) for root in _ROOTS if (folder / root).is_dir()]


def _read_project_table(folder: Path) -> Mapping[str, Any]:
    file = folder / "pyproject.toml"
    try:
        read = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(
            f"{_format_printable_path(folder)} is not a distribution: no pyproject.toml"
        ) from None
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {_format_printable_path(file)}: {error}") from error
    project = read.get("project")
    if not isinstance(project, dict):
        raise SpecError(f"{_format_printable_path(file)} has no [project] table")
    return project


def _require_named_packages(values: set[str], path: Path) -> None:
    """Checks that the packages exist, so that a missing one is not reported as a failed import."""
    for package in sorted({value.partition(":")[0].partition(".")[0] for value in values}):
        if PathFinder.find_spec(package) is None:
            where = (
                f"{_format_printable_path(path)} or its src/"
                if path.is_dir()
                else _format_printable_path(path)
            )
            raise PluginError(
                f"{where} has no module '{escape_unprintable(package)}', which its entry "
                "points name. "
                "If it lies elsewhere, build a wheel and check that: `pip wheel --no-deps PATH`"
            )


def _format_printable_path(path: Path) -> str:
    return escape_unprintable(str(path))
