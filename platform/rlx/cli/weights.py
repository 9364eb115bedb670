"""`rlx export`: the model of a run, at any time."""

import tempfile
from pathlib import Path

import click

from rlx.cli.registry import folder_of, open_registry, registry_option
from rlx.errors import EnvironmentFault, SpecError
from rlx.run.checkpoint import LATEST, Recorded, named, read_state
from rlx.run.paths import RunFolder
from rlx.run.sealed import CheckpointError, copied
from rlx.spec import ExperimentSpec
from rlx.spec.diagnostic import printable

__all__ = ["export"]


@click.command()
@click.argument("run", metavar="RUN[@STEP]")
@click.argument("folder", type=click.Path(path_type=Path))
@registry_option
def export(run: str, folder: Path, url: str) -> None:
    """Write the model of RUN to FOLDER, in the Hugging Face layout.

    It is that of RUN's newest checkpoint, or of the one named, also while RUN is running. Adapters
    are merged, and written once more alone as FOLDER/adapter.
    """
    name = printable(str(folder))
    if folder.exists():
        raise SpecError(f"{name} is there already: name a folder that is not")
    ref, at, step = run.partition("@")
    with open_registry(url) as registry:
        found = registry.run(ref)
        where = folder_of(found)
        recorded = {c.step: c.sha256 for c in registry.checkpoints(found.id)}
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".rlx-export-") as aside:
            found_step = _export(where, step if at else LATEST, recorded, Path(aside))
            (Path(aside) / "model").replace(folder)
    except CheckpointError as error:
        raise SpecError(f"no checkpoint of {found.id} can be exported: {error}") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot write {name}: {error.strerror or error}") from error
    click.echo(f"✓ {found.id} after step {found_step}: {name}")


def _export(where: RunFolder, step: str, recorded: Recorded, aside: Path) -> int:
    """Writes the model of a checkpoint to `aside`; returns the checkpoint's step."""
    from rlx.run.weights import write_weights

    source = named(where.checkpoints, step, recorded)
    state = read_state(source)
    # A run that goes on removes its old checkpoints; a twin of hard links stays.
    copied(source, aside / source.name, recorded.get(state.step))
    spec = ExperimentSpec.model_validate_json(where.resolved.read_text())
    write_weights(spec, aside / source.name, aside / "model")
    return state.step
