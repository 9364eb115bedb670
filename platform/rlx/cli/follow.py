"""Follows runs in the terminal: one run to its summary, or a group by a line per change."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlx.cli.console import open_console
from rlx.cli.progress import ProgressDisplay
from rlx.cli.run_summary import show_run_summary
from rlx.cli.runs import describe_runs, format_run_figure, print_run_table
from rlx.launch import (
    get_run_exit_code,
    is_supervisor,
    locate_run_folder,
    open_registry,
    watch_run,
)
from rlx.progress import Progress
from rlx.text import escape_unprintable, format_timestamp
from rlx_registry import Registry, RunRecord

LOOK_EVERY = 0.3
"""Seconds between two looks at a supervisor that is about to end."""
MIRROR_WAIT = 60.0
"""Longest wait for the MLflow mirror, in seconds; the supervisor continues without us."""


def follow_run(run_id: str, url: str, *, quiet: bool = False) -> int:
    """Shows the progress of a run until it ends, then its summary; returns its exit code. After a
    KeyboardInterrupt, the run continues."""
    with ProgressDisplay(open_console(stderr=True, quiet=quiet)) as display:

        def show(stage: Progress) -> None:
            display.show(stage.stage, stage.done, stage.total, stage.note or stage.doing)

        run = watch_run(run_id, url, show=show)
    until = time.monotonic() + MIRROR_WAIT
    with suppress(KeyboardInterrupt):
        while run.pid is not None and is_supervisor(run.pid, run.id) and time.monotonic() < until:
            time.sleep(LOOK_EVERY)
    with open_registry(url) as registry:
        if run.status == "finished":
            if not quiet:
                show_run_summary(registry, run)
            return 0
        code = get_run_exit_code(registry, run)
    where = os.path.relpath(locate_run_folder(run).log)
    reason = escape_unprintable(run.reason or "no reason is recorded")
    console = open_console(stderr=True)
    console.print(f"✗ {run.id} {run.effective_status}: {reason}\n  log  {where}")
    return code or 1


class GroupView:
    """The runs of a group; `cells` are the values that distinguish each, by path."""

    def __init__(
        self, registry: Registry, group: str, cells: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._registry, self._group, self._cells = registry, group, cells
        self._console, self._printed = open_console(stderr=True), dict[str, str]()

    def _list_runs(self) -> list[RunRecord]:
        """Those that nobody has removed in the meantime."""
        runs = {run.id: run for run in self._registry.runs(group=self._group)}
        return [runs[run] for run in self._cells if run in runs]

    def print_table(self) -> None:
        print_run_table(describe_runs(self._registry, self._list_runs()), self._cells)

    def print_changes(self) -> None:
        """Prints a line on stderr for each run whose status has changed since the last call."""
        changed = [r for r in self._list_runs() if self._printed.get(r.id) != r.effective_status]
        for run in describe_runs(self._registry, changed):
            self._printed[run["run"]] = run["status"]
            cell = self._cells[run["run"]]
            values = " ".join(f"{path}={json.dumps(value)}" for path, value in cell.items())
            accuracy = format_run_figure(run, "accuracy")
            cells = (format_timestamp(), run["run"], values, run["status"])
            line = "  ".join(filter(None, (*cells, f"accuracy {accuracy}" if accuracy else "")))
            self._console.print(escape_unprintable(line), soft_wrap=True)
