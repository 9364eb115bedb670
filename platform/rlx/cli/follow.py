"""Following a run in the terminal, and the summary at its end."""

import os
import time
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rlx.cli.registry import end_orphaned_run, get_run_exit_code, locate_run_folder, open_registry
from rlx.cli.summary import show_run_summary
from rlx.launch import is_abandoned, is_supervisor, reconcile_slurm_run
from rlx.run import Progress as Stage
from rlx.run import read_progress
from rlx.text import escape_unprintable
from rlx_registry import ENDED, RunRecord

__all__ = ["follow_run"]

EVERY = 0.3
ASK_EVERY = 3.0
"""Seconds between two questions to Slurm about a run that is a job of it."""
LINE_EVERY = 15.0
"""Seconds between two lines where the output is no terminal."""
MIRROR_WAIT = 60.0
"""Seconds to wait for MLflow at most; the supervisor goes on without us."""


def follow_run(run_id: str, url: str, *, quiet: bool = False) -> int:
    """Shows progress until the run has ended, then the summary.

    Returns:
        0 when the run finished, else the exit code of the kind of its failure.

    Raises:
        KeyboardInterrupt: the user stopped following; the run goes on.
    """
    progress = Console(stderr=True, highlight=False, quiet=quiet)
    run = _watch_run(run_id, url, progress)
    while run.effective_status not in ENDED:
        run = _record_lost_run(run, url)
        if run.status not in ENDED:  # somebody was quicker, and it goes on
            run = _watch_run(run_id, url, progress)
    with suppress(KeyboardInterrupt):
        _await_supervisor(run)
    with open_registry(url) as registry:
        if run.status == "finished":
            if not quiet:
                show_run_summary(registry, run, Console(highlight=False))
            return 0
        code = get_run_exit_code(registry, run)
    where = os.path.relpath(locate_run_folder(run).log)
    reason = escape_unprintable(run.reason or "no reason is recorded")
    console = Console(stderr=True, highlight=False)
    console.print(f"✗ {run.id} {run.effective_status}: {reason}\n  log  {where}", markup=False)
    return code or 1


def _watch_run(run_id: str, url: str, console: Console) -> RunRecord:
    show = _ProgressBars(console) if console.is_terminal else _ProgressLines(console)
    asked = time.monotonic()
    with open_registry(url) as registry, show:
        while True:
            run = registry.run(run_id)
            if time.monotonic() - asked > ASK_EVERY:
                run, asked = reconcile_slurm_run(registry, run), time.monotonic()
            stage = read_progress(locate_run_folder(run).progress)
            if stage is not None:
                show.show_stage(stage)
            if run.effective_status in ENDED:
                return run
            if not is_abandoned(run):
                time.sleep(EVERY)
            elif registry.run(run_id).status == run.status:  # it has not ended just now
                return run


def _record_lost_run(run: RunRecord, url: str) -> RunRecord:
    """Records that a run's supervisor died, which it cannot do itself."""
    ended = "was killed" if run.status == "running" else "ended before the run had begun"
    reason = f"its supervisor, process {run.pid}, {ended}"
    with open_registry(url, read_only=False) as registry:
        end_orphaned_run(registry, run, "lost", reason)
        return registry.run(run.id)


def _await_supervisor(run: RunRecord) -> None:
    """Waits a little for the supervisor's last deliveries, so that MLflow is complete as well."""
    until = time.monotonic() + MIRROR_WAIT
    while run.pid is not None and is_supervisor(run.pid, run.id) and time.monotonic() < until:
        time.sleep(EVERY)


class _ProgressBars:
    """One bar per stage."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<24}"),
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
        """Moves the stage's bar; earlier stages count as done."""
        if stage.stage not in self._tasks:
            for task in self._bars.tasks:
                self._bars.update(task.id, completed=task.total)
            self._tasks[stage.stage] = self._bars.add_task(
                escape_unprintable(stage.stage), total=stage.total, note=""
            )
        task_id = self._tasks[stage.stage]
        self._bars.update(task_id, completed=stage.done, note=escape_unprintable(stage.note))  # type: ignore[arg-type]


class _ProgressLines:
    """A line now and then, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ("", 0.0)

    def __enter__(self) -> "_ProgressLines":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show_stage(self, stage: Stage) -> None:
        """Prints where a new stage begins, ends, or a while has passed."""
        now = time.monotonic()
        name, at = self._last
        ended = stage.done == stage.total and name != f"{stage.stage} ended"
        if stage.stage != name.removesuffix(" ended") or ended or now - at > LINE_EVERY:
            if name == f"{stage.stage} ended":
                return
            text = f"{stage.stage:<24} {stage.done}/{stage.total}  {stage.note}"
            self._console.print(escape_unprintable(text), markup=False)
            self._last = (f"{stage.stage} ended" if stage.done == stage.total else stage.stage, now)
