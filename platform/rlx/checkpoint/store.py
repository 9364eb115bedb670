"""Checkpoints: all that the next step needs, in sealed folders.

A checkpoint is a folder `checkpoints/step_000040` with the engines' own files below `policy` and
`critic`, the run's state as `state.json`, and a manifest whose digest the registry remembers. Seeds
are derived from the step's place in the data, so the data cursor is all that sampling and scoring
need.

Nothing here imports torch: submissions look at checkpoints too.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlx import __version__
from rlx.checkpoint.sealing import (
    CheckpointError,
    check_sealed_folder,
    clear_staging_folder,
    compute_manifest_digest,
    copy_sealed_folder,
    get_staging_folder,
    seal_folder,
    write_canonical_json,
)
from rlx.spec import RunnerSpec

if TYPE_CHECKING:
    from rlx.learner import Critic, Learner, Ranks

__all__ = [
    "LATEST",
    "POLICY",
    "Recorded",
    "RunState",
    "SavedCheckpoint",
    "convert_checkpoint",
    "copy_checkpoint",
    "find_checkpoint",
    "find_newest_checkpoint",
    "folder_name",
    "has_critic",
    "list_checkpoint_steps",
    "load_checkpoint",
    "read_in_flight_bytes",
    "read_state",
    "write_checkpoint",
]

STATE, POLICY, CRITIC = "state.json", "policy", "critic"
IN_FLIGHT = "in_flight.pickle"
"""The next step's rollouts, where they were sampled ahead."""
PREFIX = "step_"
LATEST = "latest"
"""Stands for the newest checkpoint, where one is named by its step."""
CONVERTED = "converted_"
"""Begins the names of what `converted` makes; the digest of its source follows."""

Recorded = Mapping[int, str]
"""Digests that the registry has of a run's checkpoints, by their steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands between two steps.

    Attributes:
        step: the last one taken.
        cursor: problems drawn.
        learned: steps in which some rollout could be scored.
        phase: number of the phase that `step` belongs to, from 0.
        done: steps of that phase that have been taken.
        beta: β of KL in the reward where it adapts; None where it is fixed.
        states: what each estimator carries on, by its name.
        critic: steps in which the critic has learned.
        ranks: how many wrote this.
        zero_stage: under which they wrote it.
        dtype: of the weights that were trained.
        digest: of the experiment.
        version: of rlx.
    """

    step: int
    cursor: int
    learned: int
    phase: int
    done: int
    beta: float | None
    states: Mapping[str, Mapping[str, float]]
    critic: int
    ranks: int
    zero_stage: int
    dtype: str
    digest: str
    version: str = __version__

    def find_load_conflict(self, runner: RunnerSpec) -> tuple[str, str] | None:
        """A key of `runner:` under which this cannot be loaded, and why; None where it can."""
        if runner.dtype != self.dtype:
            return "dtype", f"is {runner.dtype!r}, and the checkpoint is of {self.dtype} training"
        if runner.zero_stage != self.zero_stage and 0 in (runner.zero_stage, self.zero_stage):
            why = "DeepSpeed converts between stages 1, 2 and 3"
            return "zero_stage", f"is {runner.zero_stage}, was {self.zero_stage}, and {why}"
        return None

    def needs_conversion(self, ranks: int, runner: RunnerSpec) -> bool:
        """Whether it has to be converted for so many ranks."""
        same = (ranks, runner.zero_stage) == (self.ranks, self.zero_stage)
        return runner.zero_stage > 0 and not same


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint on disk: its folder, its digest, its bytes."""

    path: Path
    sha256: str
    bytes: int


def write_checkpoint(
    root: Path,
    state: RunState,
    learner: "Learner",
    critic: "Critic | None",
    ranks: "Ranks",
    *,
    keep: int,
    in_flight: bytes | None = None,
) -> SavedCheckpoint | None:
    """Writes a checkpoint; every rank calls it.

    Args:
        root: folder of the run's checkpoints.
        keep: checkpoints that stay, this one included.
        in_flight: rollouts that the next step will learn from; None where it samples its own.

    Returns:
        What was written, on rank 0; None elsewhere.
    """
    folder = root / folder_name(state.step)
    aside = get_staging_folder(folder)
    if ranks.is_first:
        clear_staging_folder(folder)
    ranks.barrier()
    learner.save(aside / POLICY)
    if critic is not None:
        critic.save(aside / CRITIC)
    ranks.barrier()
    if not ranks.is_first:
        return None
    write_canonical_json(aside / STATE, asdict(state))
    if in_flight is not None:
        (aside / IN_FLIGHT).write_bytes(in_flight)
    seal_folder(folder)
    there = list_checkpoint_steps(root)
    later = [step for step in there if step > state.step]  # refused when the run went on
    old = [step for step in there if step <= state.step][keep:]
    gone = [root / folder_name(step) for step in (*later, *old)]
    for path in (*gone, *root.glob(f"{CONVERTED}*")):  # a conversion has served by now
        shutil.rmtree(path, ignore_errors=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return SavedCheckpoint(folder, compute_manifest_digest(folder), size)


def folder_name(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"{PREFIX}{step:06d}"


def list_checkpoint_steps(root: Path) -> list[int]:
    """Steps of the checkpoints that were completed, newest first."""
    names = [path.name.removeprefix(PREFIX) for path in root.glob(f"{PREFIX}*") if path.is_dir()]
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def find_newest_checkpoint(
    root: Path, recorded: Recorded, tell: Callable[[str], None]
) -> Path | None:
    """The newest checkpoint that is as it was written; None where there is none.

    Args:
        root: folder of the run's checkpoints.
        recorded: what the registry knows of them.
        tell: told of every one that is refused, and why.
    """
    for step in list_checkpoint_steps(root):
        folder = root / folder_name(step)
        try:
            check_sealed_folder(folder, recorded.get(step))
        except CheckpointError as error:
            tell(f"checkpoint {folder.name} is not used: {error}")
        else:
            return folder
    return None


def find_checkpoint(root: Path, step: str, recorded: Recorded) -> Path:
    """The checkpoint of a step, or the newest that is sound where `step` is "latest".

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    there = list_checkpoint_steps(root)
    if step.isdecimal() and int(step) in there:
        folder = root / folder_name(int(step))
        try:
            check_sealed_folder(folder, recorded.get(int(step)))
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {folder.name} is damaged: {error}") from error
        return folder
    refused: list[str] = []
    if step == LATEST and (found := find_newest_checkpoint(root, recorded, refused.append)):
        return found
    if refused or not there:
        raise CheckpointError(refused[0] if refused else "the run has no checkpoint")
    has = ", ".join(map(str, reversed(there)))
    raise CheckpointError(f"there is no checkpoint of step {step}; there are those of {has}")


def copy_checkpoint(root: Path, step: str, recorded: Recorded, aside: Path) -> Path:
    """A twin of the checkpoint that `named` finds, in a folder that no run clears.

    It stays where a run that goes on removes its old ones.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    while True:
        there = list_checkpoint_steps(root)
        try:
            source = find_checkpoint(root, step, recorded)
            copy_sealed_folder(source, aside / source.name, recorded.get(read_state(source).step))
        except (CheckpointError, FileNotFoundError):
            if list_checkpoint_steps(root) == there:
                raise
        else:
            return aside / source.name


def convert_checkpoint(folder: Path, root: Path) -> Path:
    """A checkpoint as any number of ranks can load it, made once and checked like any other.

    Args:
        folder: of a sound checkpoint, written under ZeRO stage 1, 2 or 3.
        root: where the conversion is kept until the next checkpoint is written.

    Raises:
        RlxError: DeepSpeed cannot convert it.
    """
    from rlx.learner import convert_checkpoints  # brings torch

    target = root / f"{CONVERTED}{compute_manifest_digest(folder)[:16]}"
    try:
        check_sealed_folder(target)
    except CheckpointError:
        aside = clear_staging_folder(target)
        convert_checkpoints(
            [folder / part for part in (POLICY, CRITIC) if (folder / part).is_dir()], aside
        )
        seal_folder(target)
    return target


def read_state(folder: Path) -> RunState:
    """The state that a checkpoint holds.

    Raises:
        CheckpointError: another version of rlx wrote it.
    """
    said = json.loads((folder / STATE).read_text())
    try:
        return RunState(**said)
    except TypeError as error:
        version = said.get("version")
        raise CheckpointError(
            f"checkpoint {folder.name} is of rlx {version}, and this is {__version__}"
        ) from error


def has_critic(folder: Path) -> bool:
    """Whether a checkpoint holds a critic."""
    return (folder / CRITIC).is_dir()


def read_in_flight_bytes(folder: Path) -> bytes | None:
    """What `write` was given to keep for the next step."""
    path = folder / IN_FLIGHT
    return path.read_bytes() if path.exists() else None


def load_checkpoint(
    folder: Path, learner: "Learner", critic: "Critic | None", *, universal: bool = False
) -> None:
    """Loads weights and optimisers; every rank calls it, after one has checked the folder.

    Args:
        universal: the folder is one that `converted` made.

    Raises:
        CheckpointError: the critic's part is missing.
    """
    if critic is not None and not has_critic(folder):
        raise CheckpointError(f"{folder.name} has no critic")
    learner.load(folder / POLICY, universal=universal)
    if critic is not None:
        critic.load(folder / CRITIC, universal=universal)
