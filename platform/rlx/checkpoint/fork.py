"""Start a run from another run's checkpoint, with its own experiment."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlx.checkpoint.store import (
    Recorded,
    RunState,
    find_checkpoint,
    folder_name,
    has_critic,
    read_state,
)
from rlx.home import RunFolder
from rlx.sealed_folder import CheckpointError, copy_sealed_folder
from rlx.spec import ExperimentSpec, KeyPath
from rlx.spec.reading import (
    Diagnostic,
    LoadedSpec,
    build_error,
    build_refusal,
    format_key_path,
    locate_diagnostic,
)
from rlx.text import escape_unprintable
from rlx_registry import AmbiguousNameError, NotFoundError, Registry, RunRecord

HERE: KeyPath = ("from_checkpoint",)


def pin_checkpoint(registry: Registry, read: LoadedSpec) -> LoadedSpec:
    """Resolves and checks `from_checkpoint` of an experiment.

    A run name and `latest` are replaced by the run's id and the step, so that the spec's digest
    identifies one checkpoint. A spec without `from_checkpoint` is returned unchanged.

    Raises:
        InvalidSpec: the checkpoint is missing, damaged, or does not fit the experiment.
    """
    reference = read.spec.from_checkpoint
    if reference is None:
        return read
    try:
        run, folder = _find_origin(registry, reference)
        state = read_state(folder)
    except (NotFoundError, AmbiguousNameError, CheckpointError) as error:
        why = escape_unprintable(str(error)).removesuffix(".")
        name = escape_unprintable(reference)
        message = f"from_checkpoint is '{name}', which is not available: {why}"
        faults = [build_error(HERE, message, kind="value")]
    else:
        faults = [
            *_check_origin_fit(read.spec, run, state),
            *_check_critic_match(read.spec, run, folder),
        ]
    if faults:
        raise build_refusal(
            [locate_diagnostic(fault, read.document) for fault in faults], read.document.file
        )
    full = {"from_checkpoint": f"{run.id}@{state.step}"}
    return replace(read, spec=read.spec.model_copy(update=full))


def copy_origin(registry: Registry, spec: ExperimentSpec, folder: RunFolder) -> None:
    """Copies the checkpoint of a pinned experiment into the new run's folder.

    Raises:
        CheckpointError: it was removed or changed after it was pinned.
    """
    if spec.from_checkpoint is None:
        return
    run_id, _, step = spec.from_checkpoint.partition("@")
    run = registry.run(run_id)
    source = _get_run_folder(run).checkpoints / folder_name(int(step))
    tokenizer = _get_run_folder(run).tokenizer
    if tokenizer.is_dir():  # the weights belong to it
        shutil.copytree(tokenizer, folder.tokenizer)
    folder.origin.mkdir(exist_ok=True)
    copy_sealed_folder(
        source, folder.origin / source.name, _get_recorded_digests(registry, run).get(int(step))
    )


def _find_origin(registry: Registry, reference: str) -> tuple[RunRecord, Path]:
    """The run that `reference` names, and the folder of its checkpoint.

    Raises:
        NotFoundError, AmbiguousNameError: the reference matches no run, or several.
        CheckpointError: the run has no such checkpoint, or it is damaged.
    """
    ref, _, step = reference.partition("@")
    run = registry.run(ref)
    root = _get_run_folder(run).checkpoints
    if run.status == "finished" and not root.exists():
        raise CheckpointError(
            f"{run.id} has finished and kept no checkpoint: runner.checkpoint.keep_finished"
        )
    return run, find_checkpoint(root, step, _get_recorded_digests(registry, run))


def _check_origin_fit(
    spec: ExperimentSpec, run: RunRecord, state: RunState
) -> Iterator[Diagnostic]:
    """Reasons why an experiment cannot start from a checkpoint, apart from its critic."""
    if state.step >= spec.steps:
        message = (
            f"phases have {spec.steps} steps, but {run.id} had already taken {state.step} at the "
            "checkpoint: no steps remain"
        )
        yield build_error(
            ("phases",), message, "steps are counted from that run's first step", against=HERE
        )
    ours, theirs = dict(spec.dump_resolved()["model"]), dict(run.spec["model"])
    if None in (ours.get("tokenizer", ""), theirs.get("tokenizer", "")):
        ours["tokenizer"] = theirs["tokenizer"]  # null takes the tokenizer of the checkpoint's run
    for path in sorted(_find_differing_paths(ours, theirs)):
        name, mine, other = (
            format_key_path(("model", *path)),
            _get_section_value(ours, path),
            _get_section_value(theirs, path),
        )
        message = f"{name} is {mine!r}, but {run.id} trained a model with {other!r}"
        yield build_error(("model", *path), message, "use the checkpoint's model", against=HERE)
    if refused := state.find_load_conflict(spec.runner):
        key, why = refused
        yield build_error(
            ("runner", key), f"runner.{key} {why}", f"use the {key} of {run.id}", against=HERE
        )


def _check_critic_match(spec: ExperimentSpec, run: RunRecord, folder: Path) -> Iterator[Diagnostic]:
    if has_critic(folder) and spec.critic is None:
        message = f"the checkpoint of {run.id} has a critic, but the experiment has none"
        yield build_error(("critic",), message, "add `critic`, as in that run", against=HERE)
    if spec.critic is not None and not has_critic(folder):
        message = f"the experiment has a critic, but the checkpoint of {run.id} has none"
        yield build_error(
            ("critic",), message, "remove `critic`, or start from a run that had one", against=HERE
        )


def _find_differing_paths(
    ours: Any, theirs: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Key paths at which two resolved sections differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours.keys() | theirs.keys():
            yield from _find_differing_paths(ours.get(key), theirs.get(key), (*path, key))
    elif ours != theirs:
        yield path


def _get_section_value(section: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        section = (section or {}).get(key)
    return section


def _get_run_folder(run: RunRecord) -> RunFolder:
    if run.directory is None:
        raise CheckpointError(f"{run.id} has no folder: its submission was interrupted")
    return RunFolder(Path(run.directory))


def _get_recorded_digests(registry: Registry, run: RunRecord) -> Recorded:
    return {c.step: c.sha256 for c in registry.results.checkpoints(run.id)}
