"""Follows a run in the terminal and prints its summary at the end."""

import os
import time
from contextlib import suppress

from rlx.cli.console import open_console
from rlx.cli.progress import ProgressDisplay
from rlx.cli.summary import show_run_summary
from rlx.launch import (
    get_run_exit_code,
    is_supervisor,
    locate_run_folder,
    open_registry,
    watch_run,
)
from rlx.run import Progress
from rlx.text import escape_unprintable
from rlx_registry import RunRecord

__all__ = ["follow_run"]

EVERY = 0.3
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
        time.sleep(EVERY)
