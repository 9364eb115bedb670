"""Writes the model of a run in the Hugging Face layout."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rlx.checkpoint import (
    LATEST,
    copy_checkpoint,
    list_checkpoint_steps,
    read_state,
    write_weights,
)
from rlx.errors import DivergedModelError, SpecError
from rlx.launch import locate_run_folder
from rlx.progress_callbacks import Report
from rlx.sealed_folder import CheckpointError
from rlx.spec import ExperimentSpec
from rlx.text import escape_unprintable, explain_write_errors
from rlx_registry import Registry, RunRecord

ABOUT = "rlx_export.json"
"""File in an exported model that says which newer checkpoints are not sound."""


def export_model(
    registry: Registry, run: RunRecord, folder: Path, step: str | None, report: Report
) -> int:
    """Writes a model of a run to a new folder.

    Args:
        registry: the run's.
        run: the run; it may go on.
        folder: the new folder.
        step: of the checkpoint, or `latest`; None takes the newest whose weights and logits are
            finite, or the trained model of a finished run that keeps no checkpoints.
        report: called with the checkpoints that are not sound.

    Returns:
        The step after which the model was written.

    Raises:
        SpecError: the folder exists, or no checkpoint can be exported.
        EnvironmentFault: the folder cannot be written.
    """
    if folder.exists():
        raise SpecError(f"{escape_unprintable(str(folder))} already exists: name a new folder")
    files = locate_run_folder(run)
    root = files.checkpoints
    recorded = {c.step: c.sha256 for c in registry.results.checkpoints(run.id)}
    spec = ExperimentSpec.from_record(run.spec)
    target = folder.absolute()
    try:
        with explain_write_errors(folder):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".rlx-export-") as aside:
                copy = partial(copy_checkpoint, root, recorded=recorded, aside=Path(aside))
                write = partial(write_weights, spec, tokenizer=files.tokenizer)
                model = Path(aside) / "model"
                if step is not None:
                    write(source := copy(step=step), model)
                    written = read_state(source).step
                elif files.model.exists() and not list_checkpoint_steps(root):
                    shutil.copytree(files.model, model)
                    written = run.step
                else:
                    written = _write_last_sound_weights(write, root, copy, model, report)
                model.replace(target)
    except (CheckpointError, DivergedModelError) as error:
        message = f"no checkpoint of {run.id} can be exported: {error}"
        if not list_checkpoint_steps(root) and files.model.exists():
            message += f"; its model after the last step is in {files.model}"
        raise SpecError(message) from error
    return written


def _write_last_sound_weights(
    write: Callable[[Path, Path], None],
    root: Path,
    copy: Callable[..., Path],
    target: Path,
    report: Report,
) -> int:
    """Writes the newest checkpoint whose weights and logits are finite; returns its step.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        DivergedModelError: no checkpoint is sound.
    """
    source = copy(step=LATEST)
    newest = read_state(source).step
    left_out: list[str] = []
    older = [step for step in list_checkpoint_steps(root) if step < newest]
    while True:
        try:
            write(source, target)
        except DivergedModelError as error:
            if not older:
                raise
            report(f"{error}; the one before is exported", err=True)
            left_out.append(str(error))
            source = copy(step=str(older.pop(0)))
        else:
            break
    step = read_state(source).step
    if left_out:
        about = {"step": step, "left_out": left_out}
        (target / ABOUT).write_text(json.dumps(about, indent=1))
    return step
