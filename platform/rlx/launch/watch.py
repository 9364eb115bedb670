"""Watches a run until it has ended, from any process that can read its registry."""

import time
from collections.abc import Callable
from pathlib import Path

from rlx.home import RunFolder
from rlx.launch.jobs import reconcile_job
from rlx.launch.processes import has_lost_supervisor, is_abandoned
from rlx.launch.run_access import end_orphaned_run, open_registry
from rlx.run import Progress, read_progress
from rlx_registry import ENDED, RunRecord

__all__ = ["watch_run"]

EVERY = 0.3
ASK_EVERY = 3.0
"""Seconds between two queries of Slurm for a run that is a Slurm job."""


def watch_run(
    run_id: str,
    url: str,
    *,
    show: Callable[[Progress], None] = lambda stage: None,
    timeout: float | None = None,
) -> RunRecord:
    """Waits until a run has ended; records it as lost if its supervisor was killed on this machine.

    Args:
        run_id: the run.
        url: URL of the registry.
        show: called with what the run is doing.
        timeout: longest wait, in seconds; None waits as long as the run takes.

    Raises:
        TimeoutError: the run has not ended in time; it goes on.
    """
    until = None if timeout is None else time.monotonic() + timeout
    run = _wait_for_end(run_id, url, show, until)
    while has_lost_supervisor(run):
        run = _record_lost_run(run, url)
        if run.status not in ENDED:  # another process took the run over, and it continues
            run = _wait_for_end(run_id, url, show, until)
    return run


def _wait_for_end(
    run_id: str, url: str, show: Callable[[Progress], None], until: float | None
) -> RunRecord:
    last_query = time.monotonic()
    with open_registry(url) as registry:
        while True:
            run = registry.run(run_id)
            if time.monotonic() - last_query > ASK_EVERY:
                run, last_query = reconcile_job(registry, run), time.monotonic()
            stage = read_progress(RunFolder(Path(run.directory or "")).progress)
            if stage is not None:
                show(stage)
            if run.effective_status in ENDED:
                return run
            if is_abandoned(run) and registry.run(run_id).status == run.status:
                return run  # and it did not end in between
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{run_id} has not ended: it is {run.effective_status}")
            time.sleep(EVERY)


def _record_lost_run(run: RunRecord, url: str) -> RunRecord:
    """Records a run as lost, since its dead supervisor cannot."""
    ended = "was killed" if run.status == "running" else "ended before the run had begun"
    reason = f"its supervisor, process {run.pid}, {ended}"
    with open_registry(url, read_only=False) as registry:
        end_orphaned_run(registry, run, "lost", reason)
        return registry.run(run.id)
