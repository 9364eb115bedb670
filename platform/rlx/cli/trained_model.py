"""Finds the trained model that a command evaluates or probes, with its experiment."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlx.checkpoint import CheckpointError, compute_manifest_digest, copy_checkpoint
from rlx.cli.output import print_text
from rlx.cli.registry import RUN_LIKE, locate_run_folder, open_registry
from rlx.cli.writing import explain_write_errors
from rlx.errors import EnvironmentFault, SpecError
from rlx.home import format_path, get_rlx_home, tracking_url
from rlx.model import check_model_files
from rlx.spec import ExperimentSpec, PretrainedModelSpec
from rlx.spec.reading import YamlDocument, parse_yaml_document, read_document
from rlx.text import escape_unprintable
from rlx_registry import ENDED, Registry, RunRecord

__all__ = [
    "TrainedModel",
    "checkpoint_target",
    "model_target",
    "run_target",
    "update_mlflow_mirror",
]

MLFLOW_SECONDS = 120.0
"""Time limit for sending results to MLflow."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model and its experiment.

    Attributes:
        name: name in messages and titles.
        document: the experiment, not yet validated.
        model: folder of the model, or its name on the hub.
        run: the run that trained the model; None if a MODEL was named.
        step: step of the run's checkpoint; None for the exported model.
        mark: digest of a checkpoint's weights, whose files are rewritten each time.
    """

    name: str
    document: YamlDocument
    model: str
    run: RunRecord | None
    step: int | None = None
    mark: str | None = None


def run_target(name: str, url: str) -> TrainedModel:
    """Returns the exported model of a run, with the run's own experiment.

    Raises:
        SpecError: the run has not exported a model yet, or a model is named instead of a run.
        EnvironmentFault: the exported model is gone.
    """
    run = _find_target_run(name, url)
    model = locate_run_folder(run).model
    if not (model / "config.json").is_file():
        if run.status == "finished":
            raise EnvironmentFault(f"{run.id} no longer has a model: {format_path(model)} is gone")
        raise SpecError(
            f"{run.id} has not exported a model: it is {run.effective_status}, and a run exports "
            "its model when it finishes"
        )
    return TrainedModel(run.id, _build_run_document(run), str(model), run)


@contextmanager
def checkpoint_target(name: str, step: int, url: str) -> Iterator[TrainedModel]:
    """Yields the model of a run at a checkpoint; its files exist until the block ends.

    Args:
        name: the run.
        step: step of one of the run's checkpoints.
        url: URL of the registry.

    Raises:
        SpecError: there is no such checkpoint, or it is damaged.
        EnvironmentFault: the run's folder cannot be written.
    """
    run = _find_target_run(name, url)
    with open_registry(url) as registry:
        recorded = {c.step: c.sha256 for c in registry.results.checkpoints(run.id)}
    from rlx.checkpoint import write_weights

    folder = locate_run_folder(run)
    spec = ExperimentSpec.model_validate_json(json.dumps(run.spec))
    with explain_write_errors(folder.root):
        place = tempfile.TemporaryDirectory(dir=folder.root, prefix=".rlx-eval-")
    with place as aside:
        model = Path(aside) / "model"
        try:
            source = copy_checkpoint(folder.checkpoints, str(step), recorded, Path(aside))
            write_weights(spec, source, model)
        except CheckpointError as error:
            raise SpecError(f"{run.id} at step {step}: {error}") from error
        mark = compute_manifest_digest(source)
        yield TrainedModel(
            f"{run.id}@{step}", _build_run_document(run), str(model), run, step, mark
        )


def model_target(name: str, file: Path) -> TrainedModel:
    """Returns the model in a folder or on the hub, with the experiment in a file.

    Raises:
        SpecError: the model cannot be used here or is a run, or the file cannot be opened.
        InvalidSpec: the file is not YAML that rlx can read.
        EnvironmentFault: the model's files are missing, damaged, or unreachable.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() and RUN_LIKE.fullmatch(name):
        raise SpecError(
            f"there is no folder {escape_unprintable(name)}; with --spec, give a model's folder "
            "or its name on the hub (a run has its own experiment)"
        )
    document = read_document(file)
    model = str(folder) if folder.is_dir() else name
    try:
        check_model_files(PretrainedModelSpec(path=model))
    except (EnvironmentFault, SpecError) as error:
        raise type(error)(str(error).removeprefix("model.path: ")) from error
    return TrainedModel(name, document, model, None)


def _find_target_run(name: str, url: str) -> RunRecord:
    if Path(name).is_dir():
        raise SpecError(
            f"{escape_unprintable(name)} is a folder; name the experiment of its model with "
            "--spec FILE"
        )
    if "/" in name:
        raise SpecError(
            f"{escape_unprintable(name)} is not a run; name the experiment of a model with "
            "--spec FILE"
        )
    with open_registry(url) as registry:
        return registry.run(name)


def _build_run_document(run: RunRecord) -> YamlDocument:
    return parse_yaml_document(json.dumps(run.spec, indent=2), f"the experiment of {run.id}")


def update_mlflow_mirror(registry: Registry, run: RunRecord) -> None:
    """Sends what was added to an ended run to MLflow, if the run is mirrored.

    A run that has not ended sends it with its own records. If MLflow is unreachable, a warning is
    printed; the registry keeps the records.
    """
    uri = run.spec.get("tracking", {}).get("mlflow")
    if uri is None or run.status not in ENDED:
        return
    from rlx.record import MirrorUnavailableError, MlflowMirror

    try:
        artifacts = get_rlx_home() / "mlartifacts"
        mirror = MlflowMirror(registry, run.id, tracking_url(uri), artifacts, MLFLOW_SECONDS)
        mirror.finish(run.status)
    except MirrorUnavailableError as error:
        why = escape_unprintable(str(error))
        warning = f"warning: MLflow was not updated: {why}; the registry has it"
        print_text(warning, err=True)
