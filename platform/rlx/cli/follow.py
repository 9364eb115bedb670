"""Follows a run in the terminal and prints its summary at the end."""

import os
import time
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rlx.cli.console import open_console
from rlx.cli.summary import show_run_summary
from rlx.launch import (
    get_run_exit_code,
    is_supervisor,
    locate_run_folder,
    open_registry,
    watch_run,
)
from rlx.run import Progress as Stage
from rlx.text import escape_unprintable
from rlx_registry import RunRecord

__all__ = ["follow_run"]

EVERY = 0.3
LINE_EVERY = 15.0
"""Seconds between two progress lines when the output is not a terminal."""
MIRROR_WAIT = 60.0
"""Longest wait for the MLflow mirror, in seconds; the supervisor continues without us."""


def follow_run(run_id: str, url: str, *, quiet: bool = False) -> int:
    """Shows the progress of a run until it ends, then its summary.

    Returns:
        0 if the run finished, else the exit code of its kind of failure.

    Raises:
        KeyboardInterrupt: the user stopped following; the run continues.
    """
    progress = open_console(stderr=True, quiet=quiet)
    with _ProgressBars(progress) if progress.is_terminal else _ProgressLines(progress) as bars:
        run = watch_run(run_id, url, show=bars.show_stage)
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
        time.sleep(EVERY)


class _ProgressBars:
    """Progress bars for a terminal, one per stage."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<24}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
        self._tasks: dict[str, object] = {}

    def __enter__(self) -> "_ProgressBars":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show_stage(self, stage: Stage) -> None:
        """Updates the bar of a stage and completes those of earlier stages."""
        if stage.stage not in self._tasks:
            for task in self._bars.tasks:
                self._bars.update(task.id, completed=task.total)
            self._tasks[stage.stage] = self._bars.add_task(
                escape_unprintable(stage.stage), total=stage.total, note=""
            )
        task_id = self._tasks[stage.stage]
        self._bars.update(task_id, completed=stage.done, note=escape_unprintable(stage.note))  # type: ignore[arg-type]


class _ProgressLines:
    """Occasional progress lines, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ("", 0.0)

    def __enter__(self) -> "_ProgressLines":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show_stage(self, stage: Stage) -> None:
        """Prints a line when a stage begins or ends, and every `LINE_EVERY` seconds."""
        now = time.monotonic()
        name, at = self._last
        ended = stage.done == stage.total and name != f"{stage.stage} ended"
        if stage.stage != name.removesuffix(" ended") or ended or now - at > LINE_EVERY:
            if name == f"{stage.stage} ended":
                return
            text = f"{stage.stage:<24} {stage.done}/{stage.total}  {stage.note}"
            self._console.print(escape_unprintable(text))
            self._last = (f"{stage.stage} ended" if stage.done == stage.total else stage.stage, now)
