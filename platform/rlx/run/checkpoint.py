"""Checkpoints: all that the next step needs, written aside, synced, renamed, and checked when read.

A checkpoint is a folder `checkpoints/step_000040` with the engines' own files below `policy` and
`critic`, the run's state as `state.json`, and `manifest.json`, which has the SHA-256 of every other
file. The folder's digest is that of its manifest. Seeds are derived from the step's place in the
data, so the data cursor is all that sampling and scoring need.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlx import __version__
from rlx.errors import RlxError
from rlx.learner import Critic, Learner, Ranks

__all__ = ["CheckpointError", "RunState", "Written", "newest", "read_state", "restore", "write"]

MANIFEST, STATE = "manifest.json", "state.json"
PREFIX, PART = "step_", ".part"


class CheckpointError(RlxError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands between two steps.

    Attributes:
        step: the last one taken.
        cursor: problems drawn.
        learned: steps in which some rollout could be scored.
        phase: number of the phase that `step` belongs to, from 0.
        done: steps of that phase that have been taken.
        beta: β of KL in the reward.
        states: what each estimator carries on, by its name.
        critic: steps in which the critic has learned.
        ranks: how many wrote this.
        digest: of the experiment.
        version: of rlx.
    """

    step: int
    cursor: int
    learned: int
    phase: int
    done: int
    beta: float
    states: Mapping[str, Mapping[str, float]]
    critic: int
    ranks: int
    digest: str
    version: str = __version__


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint on disk: its folder, its digest, its bytes."""

    path: Path
    sha256: str
    bytes: int


def write(
    root: Path,
    state: RunState,
    learner: Learner,
    critic: Critic | None,
    ranks: Ranks,
    *,
    keep: int,
) -> Written | None:
    """Writes a checkpoint; every rank calls it.

    Args:
        root: folder of the run's checkpoints.
        keep: checkpoints that stay, this one included.

    Returns:
        What was written, on rank 0; None elsewhere.
    """
    folder = root / f"{PREFIX}{state.step:06d}"
    aside = folder.with_name(folder.name + PART)
    if ranks.is_first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    ranks.barrier()
    learner.save(aside / "policy")
    if critic is not None:
        critic.save(aside / "critic")
    ranks.barrier()
    if not ranks.is_first:
        return None
    _put(aside / STATE, asdict(state))
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    _put(aside / MANIFEST, {str(path.relative_to(aside)): _sha256(path) for path in files})
    for path in (*files, aside / MANIFEST, aside):
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    aside.replace(folder)
    _sync(root)
    for old in list(_complete(root))[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Written(folder, _sha256(folder / MANIFEST), size)


def newest(root: Path, tell: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is as it was written; None where there is none.

    Args:
        root: folder of the run's checkpoints.
        tell: told of every one that is refused, and why.
    """
    for folder in _complete(root):
        try:
            _check(folder)
        except CheckpointError as error:
            tell(f"checkpoint {folder.name} is not used: {error}")
        else:
            return folder
    return None


def read_state(folder: Path) -> RunState:
    """The state that a checkpoint holds."""
    return RunState(**json.loads((folder / STATE).read_text()))


def restore(folder: Path, learner: Learner, critic: Critic | None) -> None:
    """Loads weights and optimisers; every rank calls it, after one has checked the folder.

    Raises:
        CheckpointError: the critic's part is missing.
    """
    learner.load(folder / "policy")
    if critic is not None:
        if not (folder / "critic").is_dir():
            raise CheckpointError(f"{folder.name} has no critic")
        critic.load(folder / "critic")


def _complete(root: Path) -> Iterator[Path]:
    """Folders that were renamed into place, newest first."""
    found = [p for p in root.glob(f"{PREFIX}*") if p.is_dir() and not p.name.endswith(PART)]
    return iter(sorted(found, reverse=True))


def _check(folder: Path) -> None:
    """Compares every file with the manifest.

    Raises:
        CheckpointError: one is missing, differs, or is not named there.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"its {MANIFEST} cannot be read") from error
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {MANIFEST}
    if odd := sorted(there.symmetric_difference(manifest)):
        raise CheckpointError(f"{odd[0]} is {'missing' if odd[0] in manifest else 'no part of it'}")
    for name, digest in manifest.items():
        if _sha256(folder / name) != digest:
            raise CheckpointError(f"{name} has changed since it was written")


def _put(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
