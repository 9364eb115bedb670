"""Shows the runs of a group: a live table on a terminal, else a line per change."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import Progress, TaskID
from rich.table import Column, Table

from rlx.cli.console import build_table, open_console
from rlx.cli.groups import GroupMember
from rlx.cli.progress import SPEED_OVER, format_pace
from rlx.home import RunFolder
from rlx.run import read_progress
from rlx.text import escape_unprintable, format_timestamp
from rlx_registry import ENDED, Registry, RunRecord

__all__ = ["GroupView"]

MARGIN = 6
"""Lines of a terminal that a live table leaves to its head, its caption and messages."""


class _Look(Protocol):
    def __call__(self) -> None:
        """Looks at the runs, and shows what has changed."""


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
        self._paths = list(dict.fromkeys(path for member in members for path in member.cell))
        self._pace = Progress(disable=True, speed_estimate_period=SPEED_OVER)
        self._tasks: dict[str, TaskID] = {}
        self._scores: dict[str, tuple[object, str]] = {}

    @contextmanager
    def follow(self) -> Iterator[_Look]:
        """Follows the runs on stderr during the block; yields the function that looks at them."""
        console = open_console(stderr=True)
        if not console.is_terminal:
            yield self._build_line_printer(console)
            return
        with Live(console=console, transient=True, auto_refresh=False) as live:
            yield lambda: live.update(self._build_live_table(console.height), refresh=True)

    def build_table(self) -> Table:
        """Builds the table of all runs as they are now."""
        return self._build_rows(self._read_rows())

    def _read_rows(self) -> list[tuple[RunRecord, dict[str, Any]]]:
        """Reads the runs that nobody has removed in the meantime, and measures how fast they
        are."""
        runs = self._read_runs()
        return [(runs[run], cell) for run, cell in self._cells if run in runs]

    def _read_runs(self) -> dict[str, RunRecord]:
        """Reads the runs by id; see `_read_rows`."""
        found = {run.id: run for run in self._registry.runs(group=self._group)}
        for run in found.values():
            if run.id not in self._tasks:
                self._tasks[run.id] = self._pace.add_task(run.id, total=run.steps_total)
            self._pace.update(self._tasks[run.id], completed=run.step)
        return found

    def _build_live_table(self, height: int) -> RenderableType:
        """Builds the table of the runs that fit a terminal, those that are active first."""
        rows = self._read_rows()
        room = max(1, height - MARGIN)
        if len(rows) <= room:
            return self._build_rows(rows)
        shown = sorted(rows, key=lambda row: row[0].effective_status != "running")[:room]
        counts = Counter(run.effective_status for run, _ in rows)
        states = ", ".join(f"{count} {status}" for status, count in counts.items())
        return Group(self._build_rows(shown), f"{len(rows)} runs in all: {states}")

    def _build_rows(self, rows: Sequence[tuple[RunRecord, dict[str, Any]]]) -> Table:
        return build_table(
            Column("RUN", no_wrap=True),
            *map(escape_unprintable, self._shorten_paths()),
            *("STATE", "STEP", "PACE", "ACCURACY"),
            rows=[
                (
                    run.id,
                    *(json.dumps(cell.get(path)) for path in self._paths),
                    self._describe_state(run),
                    f"{run.step}/{run.steps_total or '?'}",
                    self._describe_pace(run),
                    self._find_score(run),
                )
                for run, cell in rows
            ],
            is_text=True,
        )

    def _shorten_paths(self) -> list[str]:
        """Returns the last key of each path, or the whole path where two end in the same key."""
        keys = [path.rpartition(".")[2] for path in self._paths]
        return [
            path if keys.count(key) > 1 else key
            for path, key in zip(self._paths, keys, strict=True)
        ]

    def _build_line_printer(self, console: Console) -> _Look:
        """Builds the function that prints a line for each run whose status has changed."""
        printed: dict[str, str] = {}

        def print_new_statuses() -> None:
            for run, cell in self._read_rows():
                if printed.get(run.id) == run.effective_status:
                    continue
                printed[run.id] = run.effective_status
                values = (f"{path}={json.dumps(value)}" for path, value in cell.items())
                score = self._find_score(run)
                cells = (format_timestamp(), run.id, " ".join(values), run.effective_status)
                accuracy = f"accuracy {score}" if score else ""
                line = "  ".join(filter(None, (*cells, accuracy)))
                console.print(escape_unprintable(line), soft_wrap=True)

        return print_new_statuses

    def _describe_state(self, run: RunRecord) -> str:
        """Returns the status of a run; of one that runs, its stage."""
        if run.effective_status != "running" or run.directory is None:
            return run.effective_status
        stage = read_progress(RunFolder(Path(run.directory)).progress)
        if stage is None:
            return "running"
        count = "" if stage.stage.startswith("training") else f" {stage.done}/{stage.total}"
        return escape_unprintable(stage.stage) + count

    def _describe_pace(self, run: RunRecord) -> str:
        if run.effective_status in ENDED and run.ended and run.started:
            return f"in {run.ended - run.started:.0f} s"
        task = self._pace.tasks[self._tasks[run.id]]
        return "" if task.finished else format_pace(task)

    def _find_score(self, run: RunRecord) -> str:
        """Returns the newest accuracy on held-out problems; in parentheses before training."""
        state = run.effective_status, run.step
        if self._scores.get(run.id, (None, ""))[0] != state:
            found = self._registry.queries.evaluation_figures(run.id, "held_out")
            newest = max(found, key=lambda one: one.step, default=None)
            accuracy = None if newest is None else newest.metrics.get("accuracy")
            score = "" if accuracy is None else f"{accuracy:.3f}"
            is_early = newest is not None and newest.label == "before"
            self._scores[run.id] = state, f"({score})" if score and is_early else score
        return self._scores[run.id][1]
