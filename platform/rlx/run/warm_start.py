"""Trains a warm start before the first step, or loads one that an earlier run has trained.

Rank 0 alone trains it, so that the result does not depend on the number of ranks, and runs of any
number of ranks find it in the cache.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.home import WARM_STARTS, get_rlx_home
from rlx.model import (
    Policy,
    is_shipped_warm_start,
    read_warm_start_losses,
    warm_start_policy,
)
from rlx.phase_setup import PhaseSetup
from rlx.progress import Progress, ProgressFile
from rlx.record import Recorder
from rlx.sealed_folder import compute_manifest_digest
from rlx.spec import ExperimentSpec

if TYPE_CHECKING:  # it imports DeepSpeed, which a first contact outside of a run has no use for
    from rlx.learner import Ranks

POINTS = 100
"""Points of the curve of a warm start's loss, about."""
LINES = 10
"""Times that a warm start's losses are recorded, about, each with a line of the log."""


def start_warm(
    spec: ExperimentSpec,
    setup: PhaseSetup,
    policy: Policy,
    ranks: "Ranks",
    progress: ProgressFile,
    recorder: Recorder | None,
) -> None:
    """Trains a policy on demonstrations, if the experiment has a warm start, or loads what an
    earlier run has trained; every rank calls it.

    Args:
        policy: in float32; its weights are replaced.
    """
    trained, losses = 0, dict[int, float]()

    def report_step(done: int, total: int, loss: float) -> None:
        nonlocal trained
        trained = done
        progress.show(Progress("warm start", done, total, f"loss {loss:.3f}"))
        if _is_point(done, total, POINTS):
            losses[done] = loss
        if recorder and _is_point(done, total, LINES):
            recorder.warm_start(losses, total)
            losses.clear()
            print(f"warm start  step {done}/{total}  loss {loss:.3f}", flush=True)

    def report_damage(message: str) -> None:
        if recorder:
            recorder.announce("warm_start_refused", message)
        else:
            print(message, flush=True)

    cache = get_rlx_home() / WARM_STARTS
    cache.mkdir(parents=True, exist_ok=True)
    start = partial(
        warm_start_policy,
        *(policy, spec, setup.demonstrations, cache, report_step),
        *(setup.environment, report_damage, ranks.device),
    )
    started = start() if ranks.is_first else None
    ranks.barrier()
    if not ranks.is_first:
        start()
    if recorder and started:
        _record_start(recorder, started, reused=not trained)


def _record_start(recorder: Recorder, folder: Path, *, reused: bool) -> None:
    if reused:  # an earlier run has trained it
        losses = dict(enumerate(read_warm_start_losses(folder), start=1))
        total = len(losses)
        if points := {n: loss for n, loss in losses.items() if _is_point(n, total, POINTS)}:
            recorder.warm_start(points, total)
        origin = "that are shipped" if is_shipped_warm_start(folder) else "of an earlier run"
        print(f"warm start  {total} steps {origin} are reused", flush=True)
    recorder.phase("before training")
    message = f"begins with warm start {folder.name}"
    sha256 = compute_manifest_digest(folder)
    recorder.event("warm_start", message, path=f"{WARM_STARTS}/{folder.name}", sha256=sha256)


def _is_point(done: int, total: int, points: int) -> bool:
    """Whether a step is the first, the last or one of about `points` steps between them."""
    return done in (1, total) or done % max(1, total // points) == 0
