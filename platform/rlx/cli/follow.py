"""Follows runs in the terminal: one run to its summary, or a group by a line per change."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.table import Column, Table

from rlx.cli.console import build_table, open_console
from rlx.cli.groups import GroupMember
from rlx.cli.progress import ProgressDisplay
from rlx.cli.tables import show_run_summary
from rlx.launch import (
    get_run_exit_code,
    is_supervisor,
    locate_run_folder,
    open_registry,
    watch_run,
)
from rlx.progress import Progress
from rlx.text import escape_unprintable, format_timestamp
from rlx_registry import ENDED, Registry, RunRecord

LOOK_EVERY = 0.3
"""Seconds between two looks at a supervisor that is about to end."""
MIRROR_WAIT = 60.0
"""Longest wait for the MLflow mirror, in seconds; the supervisor continues without us."""


def follow_run(run_id: str, url: str, *, quiet: bool = False) -> int:
    """Shows the progress of a run until it ends, then its summary.

    Returns:
        0 if the run finished, else the exit code of its kind of failure.

    Raises:
        KeyboardInterrupt: the user stopped following; the run continues.
    """
    with ProgressDisplay(open_console(stderr=True, quiet=quiet)) as display:

        def show(stage: Progress) -> None:
            display.show(stage.stage, stage.done, stage.total, stage.note or stage.doing)

        run = watch_run(run_id, url, show=show)
    with suppress(KeyboardInterrupt):
        _await_supervisor(run)
    with open_registry(url) as registry:
        if run.status == "finished":
            if not quiet:
                show_run_summary(registry, run, open_console())
            return 0
        code = get_run_exit_code(registry, run)
    where = os.path.relpath(locate_run_folder(run).log)
    reason = escape_unprintable(run.reason or "no reason is recorded")
    console = open_console(stderr=True)
    console.print(f"✗ {run.id} {run.effective_status}: {reason}\n  log  {where}")
    return code or 1


def _await_supervisor(run: RunRecord) -> None:
    """Waits up to `MIRROR_WAIT` seconds for the supervisor to complete the MLflow mirror."""
    until = time.monotonic() + MIRROR_WAIT
    while run.pid is not None and is_supervisor(run.pid, run.id) and time.monotonic() < until:
        time.sleep(LOOK_EVERY)


class GroupView:
    """The runs of a group, with the values in which they differ.

    Args:
        registry: of the runs.
        group: name of the group.
        members: its members.
        runs: the run of each member.
    """

    def __init__(
        self,
        registry: Registry,
        group: str,
        members: Sequence[GroupMember],
        runs: Sequence[RunRecord],
    ) -> None:
        self._registry, self._group = registry, group
        self._cells = [(run.id, member.cell) for member, run in zip(members, runs, strict=True)]
        self._console, self._printed = open_console(stderr=True), dict[str, str]()
        self._paths = list(dict.fromkeys(path for member in members for path in member.cell))

    def build_table(self) -> Table:
        """Builds the table of all runs as they are now."""
        return self._build_rows(self._read_rows())

    def _read_rows(self) -> list[tuple[RunRecord, dict[str, Any]]]:
        """Reads the runs that nobody has removed in the meantime."""
        runs = {run.id: run for run in self._registry.runs(group=self._group)}
        return [(runs[run], cell) for run, cell in self._cells if run in runs]

    def _build_rows(self, rows: Sequence[tuple[RunRecord, dict[str, Any]]]) -> Table:
        keys = [path.rpartition(".")[2] for path in self._paths]
        heads = [
            path if keys.count(key) > 1 else key
            for path, key in zip(self._paths, keys, strict=True)
        ]
        cells = [
            (
                run.id,
                *(json.dumps(cell.get(path)) for path in self._paths),
                run.effective_status,
                f"{run.step}/{run.steps_total or '?'}",
                f"{run.ended - run.started:.0f} s"
                if run.effective_status in ENDED and run.ended and run.started
                else "",
                self._find_accuracy(run),
            )
            for run, cell in rows
        ]
        names = (*map(escape_unprintable, heads), "STATE", "STEP", "TOOK", "ACCURACY")
        return build_table(Column("RUN", no_wrap=True), *names, rows=cells, is_text=True)

    def print_changes(self) -> None:
        """Prints a line on stderr for each run whose status has changed since the last call."""
        for run, cell in self._read_rows():
            if self._printed.get(run.id) == run.effective_status:
                continue
            self._printed[run.id] = run.effective_status
            values = " ".join(f"{path}={json.dumps(value)}" for path, value in cell.items())
            accuracy = self._find_accuracy(run)
            cells = (format_timestamp(), run.id, values, run.effective_status)
            line = "  ".join(filter(None, (*cells, f"accuracy {accuracy}" if accuracy else "")))
            self._console.print(escape_unprintable(line), soft_wrap=True)

    def _find_accuracy(self, run: RunRecord) -> str:
        """Returns the newest accuracy on held-out problems; in parentheses before training."""
        found = self._registry.results.evaluations(run.id, "held_out", with_payload=False)
        newest = max(found, key=lambda one: one.step, default=None)
        accuracy = None if newest is None else newest.metrics.get("accuracy")
        if newest is None or accuracy is None:
            return ""
        return f"({accuracy:.3f})" if newest.label == "before" else f"{accuracy:.3f}"
