"""Distributions of this repository beside rlx, made importable without being installed."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def importable(name, into):
    """Writes the metadata of `plugins/NAME`; returns what has to be on PYTHONPATH."""
    folder = ROOT / "plugins" / name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = into / f"{name.replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head)
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return [str(into), str(folder)]
