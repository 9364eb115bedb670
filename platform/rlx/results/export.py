"""Writes the model of a run in the Hugging Face layout, with a card on demand."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx import __version__
from rlx.checkpoint import LATEST, copy_checkpoint, list_checkpoint_steps, read_state, write_weights
from rlx.errors import DivergedModelError, EnvironmentFault, SpecError, summarize_error
from rlx.launch import locate_run_folder
from rlx.plugin_files import KeptPlugin, list_plugin_names
from rlx.sealed_folder import CheckpointError
from rlx.spec import ExperimentSpec, get_at_path
from rlx.text import escape_unprintable, explain_write_errors
from rlx_registry import EvaluationRecord, Registry, RunRecord


def export_model(registry: Registry, run: RunRecord, folder: Path, step: str | None) -> int:
    """Writes a model of a run, which may go on, to a new folder; returns the step that it has.

    Args:
        step: of the checkpoint, or `latest`; None takes the newest, or the trained model of a
            finished run that keeps no checkpoints.

    Raises:
        SpecError: the folder exists, or the checkpoint is not there, is damaged, or diverged.
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
                model = Path(aside) / "model"
                if step is None and files.model.exists() and not list_checkpoint_steps(root):
                    shutil.copytree(files.model, model)
                    written = run.step
                else:
                    source = copy_checkpoint(root, step or LATEST, recorded, Path(aside))
                    write_weights(spec, source, model, files.tokenizer)
                    written = read_state(source).step
                model.replace(target)
    except CheckpointError as error:
        message = f"no checkpoint of {run.id} can be exported: {error}"
        if not list_checkpoint_steps(root) and files.model.exists():
            message += f"; its model after the last step is in {files.model}"
        raise SpecError(message) from error
    except DivergedModelError as error:
        steps = ", ".join(map(str, list_checkpoint_steps(root)))
        raise SpecError(f"{error}; name an earlier one of {run.id}, RUN@STEP: {steps}") from error
    return written


EXPERIMENT, FIGURES, CARD = OWN_FILES = ("experiment.yaml", "figures.json", "README.md")


PICTURES = {
    "reliability": "Accuracy against stated confidence, before and after training",
    "curves": "Training, step by step",
}
"""What the card shows of the pictures of a run, with captions."""


COLUMNS = {
    "accuracy": "accuracy",
    "brier": "Brier score",
    "ece_debiased": "ECE, debiased",
    "auroc": "AUROC",
}
"""Figures of the card's table, with their names there."""


def write_card(
    registry: Registry, run: RunRecord, step: int, folder: Path, *, with_data: bool
) -> None:
    """Writes a card beside the model that was exported after `step`, with all that another home
    needs for its figures: README.md is the card; experiment.yaml the resolved experiment, which
    names files of plugins beside it; figures.json all evaluations, and digests of plugins and data.
    `with_data` also copies the data files of the experiment.

    Raises:
        EnvironmentFault: the folder cannot be written, or a kept plugin or a data file is gone.
    """
    evaluations = [
        found
        for found in registry.results.evaluations(run.id)
        if found.label == "before" or found.step == step  # of this model, not of a later one
    ]
    with explain_write_errors(folder):
        spec = _write_experiment(run, folder, with_data=with_data)
        names = []
        for name in PICTURES if step == run.step else ():  # they show the whole run
            source = locate_run_folder(run).pictures / f"{name}.png"
            if source.is_file():
                shutil.copyfile(source, folder / source.name)
                names.append(name)
        about = {
            "run": run.id,
            "digest": run.digest,
            "seed": run.seed,
            "step": step,
            "code": run.code,
            "environment": run.environment,
            "plugins": run.plugins,
            "evaluations": [
                {key: getattr(found, key) for key in ("suite", "label", "step", "n", "metrics")}
                for found in evaluations
            ],
        }
        (folder / FIGURES).write_text(json.dumps(about, indent=1, default=str))
        text = "\n".join(_write_text(run, spec, step, evaluations, names))
        metadata = _build_metadata(run, spec, evaluations)
        (folder / CARD).write_text(f"---\n{metadata}---\n{text}\n")


def _write_experiment(run: RunRecord, folder: Path, *, with_data: bool) -> dict[str, Any]:
    """Writes the experiment with the files that it names; returns its values."""
    written = ExperimentSpec.from_record(run.spec).dump_resolved()
    for path, name in list(list_plugin_names(written)):
        if kept := KeptPlugin.parse(name):
            file = folder / kept.file
            text = kept.locate().read_bytes()
            if file.exists() and file.read_bytes() != text:  # another file of the same name
                file = folder / kept.digest / kept.file
                file.parent.mkdir(exist_ok=True)
            file.write_bytes(text)
            place = f"{file.relative_to(folder)}:{kept.name}"
            get_at_path(written, path[:-1])[path[-1]] = place
    if with_data:
        written["task"] = _copy_data(written["task"], folder)
        written["evaluation"] = _copy_data(written["evaluation"], folder)
        written["model"]["warm_start"] = _copy_data(written["model"].get("warm_start"), folder)
    (folder / EXPERIMENT).write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    return written


def _copy_data(node: Any, folder: Path) -> Any:
    """Copies the files that options name; returns the options with the copies' names. A copy keeps
    its path, so that the digest stays, where that is a free one inside the folder."""
    if isinstance(node, dict):
        return {key: _copy_data(value, folder) for key, value in node.items()}
    if isinstance(node, list):
        return [_copy_data(value, folder) for value in node]
    if not isinstance(node, str) or not os.path.isfile(node):  # noqa: PTH113  (any text at all)
        return node
    own, number = Path(node), 1
    is_inside = not own.is_absolute() and ".." not in own.parts and node not in OWN_FILES
    target = folder / own
    if not is_inside or (target.exists() and target.read_bytes() != own.read_bytes()):
        target = folder / "data" / own.name
    target.parent.mkdir(parents=True, exist_ok=True)
    while target.exists() and target.read_bytes() != Path(node).read_bytes():
        number += 1
        target = target.with_name(f"{number}-{Path(node).name}")
    shutil.copyfile(node, target)
    return str(target.relative_to(folder))


def _build_metadata(
    run: RunRecord, spec: Mapping[str, Any], evaluations: Sequence[EvaluationRecord]
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=spec["task"]["plugin"],
            dataset_name=f"{run.name}, {found.suite}",
            metric_type=name,
            metric_name=label,
            metric_value=found.metrics[name],
        )
        for found in evaluations
        if found.label != "before"
        for name, label in COLUMNS.items()
        if found.metrics.get(name) is not None
    ]
    base = spec["model"].get("path")
    is_on_hub = base is not None and not Path(base).exists()
    data = ModelCardData(
        library_name="transformers",
        tags=["rlx", "reinforcement-learning", spec["estimator"]["name"]],
        base_model=base if is_on_hub else None,
        model_name=run.name if results else None,
        eval_results=results or None,
    )
    return f"{data.to_yaml()}\n"


def _write_text(
    run: RunRecord,
    spec: Mapping[str, Any],
    step: int,
    evaluations: Sequence[EvaluationRecord],
    pictures: Sequence[str],
) -> Iterator[str]:
    rewards = [name for scope in ("turn", "global") for name in spec["rewards"][scope]]
    base = spec["model"].get("path") or "A tiny model of random weights"
    yield f"# {run.name}\n"
    whole = "" if step == run.steps_total else f" of {run.steps_total}"
    yield f"{base}, trained for {step}{whole} steps by rlx {__version__}:"
    yield (
        f"schedule `{spec['rollout']['schedule']}`, task `{spec['task']['plugin']}`, rewards "
        f"{', '.join(f'`{name}`' for name in rewards) or 'none'}, estimator "
        f"`{spec['estimator']['name']}`, seed {run.seed}. The whole experiment is in "
        f"[{EXPERIMENT}]({EXPERIMENT}), digest `{run.digest}`.\n"
    )
    yield from _write_figures(evaluations)
    for name in pictures:
        yield f"![{PICTURES[name]}]({name}.png)\n"
    yield "## Again\n"
    data = dict.fromkeys(
        f"- `{record['name']}`, {name}: `{digest}`"
        for record in run.plugins
        for name, digest in (record.get("data") or {}).items()
    )
    needs = " and its data files, where the experiment names them" if data else ""
    yield f"In this folder, with the same versions (`{FIGURES}` has them){needs}:\n"
    yield "```bash"
    yield f"rlx eval . --spec {EXPERIMENT}    # the figures of this model"
    yield f"rlx submit {EXPERIMENT}           # the whole training"
    yield "```\n"
    if spec["model"].get("path"):
        yield f"The training begins with {base}, which is not part of this folder.\n"
    if spec.get("from_checkpoint"):
        yield f"The training began with a checkpoint of another run, {spec['from_checkpoint']}.\n"
    if data:
        yield "Digests of the records that it read:\n"
        yield from data
        yield ""
    yield "## What it must not be used for\n"
    yield (
        f"It was trained for the task `{spec['task']['plugin']}` alone, by a score. What a score "
        "does not see may have become worse: other tasks, other languages, safety, the truth of "
        "its reasoning. The figures hold for problems like the held-out ones; confidences that it "
        "states are not known to be calibrated for any others. Do not let it decide anything that "
        "concerns people without measuring it there first."
    )


def _write_figures(evaluations: Sequence[EvaluationRecord]) -> Iterator[str]:
    """The table of figures with 95 % intervals over problems, then all that have others."""
    rows = [found for found in evaluations if _has_columns(found)]
    names = [name for name in COLUMNS if any(row.metrics.get(name) is not None for row in rows)]
    if rows:
        from rlx.evaluation import compute_intervals  # brings the rewards

        yield f"| set | when | answers | {' | '.join(COLUMNS[name] for name in names)} |"
        yield f"| --- | --- | ---: |{' ---: |' * len(names)}"
        for row in rows:
            intervals = row.metrics.get("intervals") or compute_intervals(row.payload or {}, names)
            cells = []
            for name in names:
                value, interval = row.metrics.get(name), intervals.get(name)
                around = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
                cells.append("–" if value is None else f"{value:.3f}{around}")
            yield f"| {row.suite} | {_say_when(row)} | {row.n} | {' | '.join(cells)} |"
        yield "\n95 % intervals over problems are in brackets.\n"
    for found in evaluations:
        if not _has_columns(found):
            figures = ", ".join(
                f"{name} {value:.3f}"
                for name, value in found.metrics.items()
                if isinstance(value, int | float) and name != "n"
            )
            yield f"- {found.suite}, {_say_when(found)}, {found.n} answers: {figures or 'none'}"
    yield ""


def _has_columns(found: EvaluationRecord) -> bool:
    """Whether the table shows it: figures of probes and other tools have their own names."""
    is_own = not found.suite.startswith("probe/") and "tool" not in (found.payload or {})
    return is_own and any(found.metrics.get(name) is not None for name in COLUMNS)


def _say_when(found: EvaluationRecord) -> str:
    return f"step {found.step}" if found.label == "step" else found.label


def push_model(folder: Path, name: str, *, private: bool) -> str:
    """Uploads an exported model to the Hugging Face hub, or to the one that HF_ENDPOINT names,
    where the repository `OWNER/NAME` is made if need be; returns its address.

    Raises:
        SpecError: the hub refuses the name or the upload, for instance without a token.
        EnvironmentFault: the hub cannot be reached, or a file cannot be read.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = HfApi()
    try:
        place = hub.create_repo(name, private=private, exist_ok=True)
        uploaded = hub.upload_folder(
            repo_id=place.repo_id, folder_path=folder, commit_message="A model trained by rlx"
        )
    except (HfHubHTTPError, HFValidationError) as error:
        raise SpecError(f"{name} was not pushed: {summarize_error(error)}") from error
    except Exception as error:  # of the library below, whose name differs between versions
        why = f"{type(error).__name__}: {summarize_error(error)}"
        raise EnvironmentFault(f"{name} was not pushed to {hub.endpoint}: {why}") from error
    return str(uploaded.commit_url)
