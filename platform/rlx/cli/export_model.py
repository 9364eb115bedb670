"""`rlx export`: writes the model of a run in the Hugging Face layout."""

import json
import tempfile
from pathlib import Path

import click

from rlx.checkpoint import LATEST, CheckpointError, copy_checkpoint, read_state
from rlx.cli.registry import locate_run_folder, open_registry, registry_option
from rlx.errors import EnvironmentFault, SpecError
from rlx.spec import ExperimentSpec
from rlx.text import escape_unprintable

__all__ = ["export"]


@click.command()
@click.argument("run", metavar="RUN[@STEP]")
@click.argument("folder", type=click.Path(path_type=Path))
@registry_option
def export(run: str, folder: Path, url: str) -> None:
    """Write the model of RUN to FOLDER, in the Hugging Face layout.

    Exports RUN's newest checkpoint, or the one at STEP, also while RUN is running. LoRA adapters
    are merged into the model, and also written separately to FOLDER/adapter.
    """
    name = escape_unprintable(str(folder))
    if folder.exists():
        raise SpecError(f"{name} is there already: name a folder that is not")
    ref, at, step = run.partition("@")
    with open_registry(url) as registry:
        found = registry.run(ref)
        root = locate_run_folder(found).checkpoints
        recorded = {c.step: c.sha256 for c in registry.results.checkpoints(found.id)}
    from rlx.checkpoint import write_weights

    spec = ExperimentSpec.model_validate_json(json.dumps(found.spec))
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".rlx-export-") as aside:
            source = copy_checkpoint(root, step if at else LATEST, recorded, Path(aside))
            step = str(read_state(source).step)
            write_weights(spec, source, Path(aside) / "model")
            (Path(aside) / "model").replace(folder)
    except CheckpointError as error:
        raise SpecError(f"no checkpoint of {found.id} can be exported: {error}") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot write {name}: {error.strerror or error}") from error
    click.echo(f"✓ {found.id} after step {step}: {name}")
