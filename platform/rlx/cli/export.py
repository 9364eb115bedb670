"""`rlx export`: writes the model of a run in the Hugging Face layout."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from rlx.checkpoint import LATEST, copy_checkpoint, list_checkpoint_steps, read_state
from rlx.cli.options import complete_run, registry_option
from rlx.cli.output import print_text
from rlx.errors import DivergedModelError, SpecError
from rlx.launch import locate_run_folder, open_registry
from rlx.sealed_folder import CheckpointError
from rlx.spec import ExperimentSpec
from rlx.text import escape_unprintable, explain_write_errors

ABOUT = "rlx_export.json"
"""File in an exported model that says which newer checkpoints are not sound."""


@click.command()
@click.argument("run", metavar="RUN[@STEP]", shell_complete=complete_run)
@click.argument("folder", type=click.Path(path_type=Path))
@registry_option
def export(run: str, folder: Path, url: str) -> None:
    """Write the model of RUN to FOLDER, in the Hugging Face layout.

    Exports RUN's newest checkpoint, or the one at STEP, also while RUN is running; once RUN has
    finished and keeps no checkpoints, its trained model. A newest checkpoint whose weights or
    logits are not finite, as those of a run that diverged, is named, and the last sound one is
    exported. LoRA adapters are merged into the model, and also written separately to
    FOLDER/adapter.
    """
    name = escape_unprintable(str(folder))
    if folder.exists():
        raise SpecError(f"{name} already exists: name a new folder")
    ref, at, step = run.partition("@")
    with open_registry(url) as registry:
        found = registry.run(ref)
        files = locate_run_folder(found)
        root, tokenizer = files.checkpoints, files.tokenizer
        recorded = {c.step: c.sha256 for c in registry.results.checkpoints(found.id)}
    from rlx.checkpoint import write_weights

    spec = ExperimentSpec.from_record(found.spec)
    target = folder.absolute()
    try:
        with explain_write_errors(folder):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".rlx-export-") as aside:
                copy = partial(copy_checkpoint, root, recorded=recorded, aside=Path(aside))
                write = partial(write_weights, spec, tokenizer=tokenizer)
                if at:
                    write(written := copy(step=step), Path(aside) / "model")
                    step = str(read_state(written).step)
                elif files.model.exists() and not list_checkpoint_steps(root):
                    shutil.copytree(files.model, Path(aside) / "model")
                    step = str(found.step)
                else:
                    written = _write_last_sound_weights(write, root, copy, Path(aside) / "model")
                    step = str(read_state(written).step)
                (Path(aside) / "model").replace(target)
    except (CheckpointError, DivergedModelError) as error:
        message = f"no checkpoint of {found.id} can be exported: {error}"
        if not list_checkpoint_steps(root):
            model = locate_run_folder(found).model
            message += f"; its model after the last step is in {model}" if model.exists() else ""
        raise SpecError(message) from error
    print_text(f"✓ {found.id} after step {step}: {name}")


def _write_last_sound_weights(
    write: Callable[[Path, Path], None], root: Path, copy: Callable[..., Path], target: Path
) -> Path:
    """Writes the newest checkpoint whose weights and logits are finite; returns its copy.

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
            print_text(f"{error}; the one before is exported", err=True)
            left_out.append(str(error))
            source = copy(step=str(older.pop(0)))
        else:
            break
    if left_out:
        about = {"step": read_state(source).step, "left_out": left_out}
        (target / ABOUT).write_text(json.dumps(about, indent=1))
    return source
