"""The trained model that a command is asked about, and the experiment that it belongs to."""

import json
from dataclasses import dataclass
from pathlib import Path

import click

from rlx.cli.registry import folder_of, open_registry
from rlx.errors import EnvironmentFault, SpecError
from rlx.run.paths import home, shown, tracking_url
from rlx.spec.diagnostic import printable
from rlx.spec.reader import read_document
from rlx.spec.source import Document, parse
from rlx_registry import Registry, RunRecord

__all__ = ["Target", "folder_target", "run_target", "tell_mlflow"]


@dataclass(frozen=True, slots=True)
class Target:
    """A model and its experiment.

    Attributes:
        name: for messages and titles.
        document: the experiment, not yet checked.
        model: folder of the model.
        run: None for a folder that no run is named for.
    """

    name: str
    document: Document
    model: Path
    run: RunRecord | None


def run_target(name: str, url: str) -> Target:
    """The model that a run has exported, with the run's own experiment.

    Raises:
        SpecError: it has exported none yet.
        EnvironmentFault: its model is gone.
    """
    with open_registry(url) as registry:
        if Path(name).is_dir():
            raise SpecError(
                f"{printable(name)} is a folder; name the experiment of its model with --spec FILE"
            )
        run = registry.run(name)
    model = folder_of(run).model
    if not (model / "config.json").is_file():
        if run.status == "finished":
            raise EnvironmentFault(f"{run.id} has no model any more: {shown(model)} is gone")
        raise SpecError(
            f"{run.id} has exported no model: it is {run.effective_status}, and a run exports its "
            "model when it has finished"
        )
    document = parse(json.dumps(run.spec, indent=2), f"the experiment of {run.id}")
    return Target(run.id, document, model, run)


def folder_target(name: str, file: Path) -> Target:
    """The model in a folder, with the experiment in a file.

    Raises:
        SpecError: there is no such folder, or the file cannot be opened.
        InvalidSpec: the file is not YAML as rlx reads it.
    """
    model = Path(name).expanduser()
    if not model.is_dir():
        raise SpecError(
            f"there is no folder {printable(name)}; with --spec, a model's folder is named (a run "
            "has its own experiment)"
        )
    return Target(name, read_document(file), model, None)


def tell_mlflow(registry: Registry, run: RunRecord) -> None:
    """Mirrors what was added to an ended run, where it is mirrored; else the registry has it."""
    uri = run.spec.get("tracking", {}).get("mlflow")
    if uri is None:
        return
    from rlx.record.mirror import MirrorDown, MlflowMirror

    try:
        mirror = MlflowMirror(registry, run.id, tracking_url(uri), home() / "mlartifacts")
        mirror.finish(run.status)
    except MirrorDown as error:
        said = f"warning: MLflow was not told: {printable(str(error))}; the registry has it"
        click.echo(said, err=True)
