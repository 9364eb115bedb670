"""Distributions beside rlx, made importable without being installed."""

import os
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_distribution(folder, name, points="", *, version="1.0", **modules):
    """Writes the metadata of a distribution with its entry points, and its modules by name."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(points)
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


@contextmanager
def installed(folder, monkeypatch, name, points, **modules):
    """Such a distribution, found by this process and by those that it starts."""
    write_distribution(folder, name, points, **modules)
    monkeypatch.syspath_prepend(folder)
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *inherited]))
    yield
    for module in modules:
        sys.modules.pop(module, None)


def importable(name, into):
    """Writes the metadata of `plugins/NAME`; returns what has to be on PYTHONPATH."""
    folder = ROOT / "plugins" / name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    write_distribution(into, name, "\n".join([*lines, ""]), version=project["version"])
    return [str(into), str(folder)]
