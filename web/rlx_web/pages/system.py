"""The system page: the registry, supervised runs, devices, disks and plugins."""

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlx_registry import Registry
from rlx_web.pages.runs import build_row_summary

__all__ = ["build_system_page"]

LARGEST = 12
"""Number of runs listed by file size."""


def build_system_page(registry: Registry) -> dict[str, Any]:
    """The state of the registry, of runs and devices, of disk usage and of plugins."""
    rows = registry.queries.run_rows()
    stored = registry.queries.stored_bytes()
    largest = sorted(stored, key=lambda run: -sum(stored[run].values()))[:LARGEST]
    names = {row.id: row.name for row in rows}
    return {
        "registry": registry.queries.describe_database(),
        "statuses": registry.queries.statuses(),
        "leases": [
            build_row_summary(row)
            | {"silent": _compute_silence(row.heartbeat or row.started or row.created)}
            for row in registry.queries.supervised_runs()
        ],
        "devices": [asdict(device) for device in registry.machines.devices()],
        "disks": _list_run_disks({row.directory for row in rows if row.directory}),
        "stored": {
            "rollouts": sum(s.get("rollouts", 0) for s in stored.values()),
            "checkpoints": sum(s.get("checkpoints", 0) for s in stored.values()),
            "largest": [{"run": run, "name": names.get(run, ""), **stored[run]} for run in largest],
        },
        "plugins": [asdict(plugin) for plugin in registry.machines.plugins()],
    }


def _compute_silence(last: float) -> float:
    return max(0.0, time.time() - last)


def _list_run_disks(folders: set[str]) -> list[dict[str, Any]]:
    """Every disk that holds runs, once, by the parent folder of the runs."""
    found: dict[int, dict[str, Any]] = {}
    for parent in sorted({Path(folder).parent for folder in folders}):
        try:
            device, usage = parent.stat().st_dev, shutil.disk_usage(parent)
        except OSError:
            continue  # on another machine, or deleted
        sizes = {"total": usage.total, "used": usage.used, "free": usage.free}
        found.setdefault(device, {"folder": str(parent), **sizes})
    return list(found.values())
