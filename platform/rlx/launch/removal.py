"""Removes runs that have ended: their files, their records and their MLflow runs."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rlx.errors import SpecError
from rlx.home import RunFolder, get_rlx_home
from rlx.launch.run_access import KILLED
from rlx.record import get_mlflow_uri, open_trackers
from rlx_registry import (
    ENDED,
    Registry,
    RunRecord,
)

__all__ = ["Removal", "plan_removal", "remove_run_data"]


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be removed of one run.

    Attributes:
        whole: the whole run, with its records and its MLflow run.
        rollouts: its stored rollouts and their index.
        files: files and folders of this machine, none inside another.
        bytes: their size.
        mlflow: id of the MLflow run that is moved to MLflow's trash; None if there is none.
    """

    run: RunRecord
    whole: bool
    rollouts: bool
    files: tuple[Path, ...]
    bytes: int
    mlflow: str | None


def plan_removal(run: RunRecord, *, rollouts: bool = False, checkpoints: bool = False) -> Removal:
    """Lists what a removal would delete.

    Args:
        run: the run.
        rollouts: remove its rollouts.
        checkpoints: remove its checkpoints; the trained model stays.

    Returns:
        The removal of these parts, or of the whole run if neither is named.

    Raises:
        SpecError: the run has not ended.
    """
    if run.effective_status not in ENDED:
        raise SpecError(f"{run.id} is {run.effective_status}: stop it first, rlx stop {run.id}")
    whole = not (rollouts or checkpoints)
    mlflow = run.mlflow_run_id if whole and get_mlflow_uri(run) is not None else None
    root = RunFolder(Path(run.directory or ""))
    parts = [root.rollouts(0).parent.name] * rollouts
    parts += [root.checkpoints.name, root.origin.name] * checkpoints
    places = [root.root] * whole + [root.root / part for part in parts] if run.directory else []
    if mlflow is not None:
        places += (get_rlx_home() / "mlartifacts").glob(f"*/{mlflow}")
    files = tuple(path for path in places if path.exists())
    return Removal(
        run=run,
        whole=whole,
        rollouts=whole or rollouts,
        files=files,
        bytes=sum(map(_measure_size, files)),
        mlflow=mlflow,
    )


def remove_run_data(registry: Registry, removal: Removal) -> None:
    """Removes what `plan_removal` listed: first from MLflow, then from the registry, then files.

    Raises:
        TrackerUnavailableError: MLflow cannot be reached; nothing has been removed.
        SpecError: the run has been started again.
        OSError: a file cannot be removed.
    """
    run = registry.run(removal.run.id)
    if run.attempt != removal.run.attempt or run.effective_status not in ENDED:
        raise SpecError(f"{run.id} has been started again: nothing of it was removed")
    if run.status not in ENDED and not _record_loss(registry, run):
        raise SpecError(f"{run.id} has been started again: nothing of it was removed")
    if removal.mlflow is not None:
        for tracker in open_trackers(registry, run):
            tracker.discard(run)
    if removal.whole:
        registry.delete_run(run.id)
    elif removal.rollouts:
        registry.delete_rollouts(run.id)
    for path in removal.files:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _record_loss(registry: Registry, run: RunRecord) -> bool:
    """Records that a run is lost, which nobody has yet; False if a worker was faster."""
    return registry.transition(run.id, {run.status}, "lost", KILLED, seen=run)


def _measure_size(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(file.lstat().st_size for file in files)
