"""Checkpoints of a run: write, verify, find, load, fork and export them.

A checkpoint is a sealed folder such as `checkpoints/step_000040`, ignored unless complete, with the
state that the next step needs. It holds the engines' own files in `policy` and `critic`, the run's
state in `state.json`, and a manifest whose digest the registry records. Seeds are derived from the
position in the data, so sampling and scoring only need the data cursor.

This module does not import torch at the top level, because submissions read checkpoints too.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx import __version__
from rlx.errors import DivergedModelError, RlxError
from rlx.home import RunFolder
from rlx.importing import speed_up_imports
from rlx.sealed_folder import (
    CheckpointError,
    check_sealed_folder,
    clear_staging_folder,
    compute_manifest_digest,
    copy_sealed_folder,
    get_staging_folder,
    list_files,
    seal_folder,
    sync_folder,
    write_canonical_json,
)
from rlx.spec import ExperimentSpec, KeyPath, RunnerSpec
from rlx.spec.reading import (
    Diagnostic,
    LoadedSpec,
    build_error,
    format_key_path,
)
from rlx.text import escape_unprintable
from rlx_registry import AmbiguousNameError, NotFoundError, Registry, RunRecord

if TYPE_CHECKING:
    from rlx.learner import Critic, Learner, Ranks

STATE, POLICY, CRITIC = "state.json", "policy", "critic"
PREFIX = "step_"
LATEST = "latest"
"""Selects the newest checkpoint, in place of a step."""
CONVERTED = "converted_"
"""Name prefix of folders made by `convert_checkpoint`, followed by the digest of the source."""
Recorded = Mapping[int, str]
"""Digests of a run's checkpoints in the registry, by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run between two steps.

    Attributes:
        step: the last completed step.
        cursor: number of problems drawn.
        learned: number of steps in which some rollout could be scored.
        phase: index of the phase that `step` belongs to, from 0.
        done: completed steps of that phase.
        beta: adaptive β of KL in the reward; None if it is fixed.
        states: state carried over by each estimator, by its name.
        critic: number of steps in which the critic was trained.
        ranks, zero_stage, dtype: by how many ranks it was written, under which ZeRO stage, and the
            dtype of the trained weights.
        digest: of the experiment.
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
        """The key of `runner:` that prevents loading, and the reason; None if it can be loaded."""
        if runner.dtype != self.dtype:
            return "dtype", f"is {runner.dtype!r}, but the checkpoint was trained in {self.dtype}"
        if runner.zero_stage != self.zero_stage and 0 in (runner.zero_stage, self.zero_stage):
            why = "DeepSpeed converts between stages 1, 2 and 3"
            return "zero_stage", f"is {runner.zero_stage}, was {self.zero_stage}, and {why}"
        return None

    def needs_conversion(self, ranks: int, runner: RunnerSpec) -> bool:
        """Whether it must be converted before `ranks` ranks can load it under `runner`."""
        same = (ranks, runner.zero_stage) == (self.ranks, self.zero_stage)
        return runner.zero_stage > 0 and not same


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint on disk: its folder, manifest digest, and size in bytes."""

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
) -> SavedCheckpoint | None:
    """Writes a checkpoint and removes all but the `keep` newest; every rank must call it. Returns
    the checkpoint on rank 0, None on other ranks.

    Raises:
        CheckpointError: rank 0 does not find what another rank has written.
    """
    folder = root / folder_name(state.step)
    aside = get_staging_folder(folder)
    if ranks.is_first:
        clear_staging_folder(folder)
    ranks.barrier()
    learner.engine.save(aside / POLICY)
    if critic is not None:
        critic.engine.save(aside / CRITIC)
    sync_folder(aside)
    written = {name for share in ranks.gather(list_files(aside)) for name in share}
    if not ranks.is_first:
        return None
    write_canonical_json(aside / STATE, asdict(state))
    seal_folder(folder, written)
    there = list_checkpoint_steps(root)
    later = [step for step in there if step > state.step]  # rejected when the run resumed
    old = [step for step in there if step <= state.step][keep:]
    gone = [root / folder_name(step) for step in (*later, *old)]
    for path in (*gone, *root.glob(f"{CONVERTED}*")):  # conversions are no longer needed
        shutil.rmtree(path, ignore_errors=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return SavedCheckpoint(folder, compute_manifest_digest(folder), size)


def folder_name(step: int) -> str:
    return f"{PREFIX}{step:06d}"


def list_checkpoint_steps(root: Path) -> list[int]:
    """Steps of the completed checkpoints, newest first."""
    names = [path.name.removeprefix(PREFIX) for path in root.glob(f"{PREFIX}*") if path.is_dir()]
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def find_newest_checkpoint(
    root: Path, recorded: Recorded, tell: Callable[[str], None]
) -> Path | None:
    """The newest undamaged checkpoint; None if there is none. `tell` gets a message for every
    checkpoint that is rejected."""
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
    """The checkpoint of a step, or the newest undamaged one if `step` is "latest".

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
    raise CheckpointError(f"there is no checkpoint of step {step}; available steps: {has}")


def copy_checkpoint(root: Path, step: str, recorded: Recorded, aside: Path) -> Path:
    """Copies the checkpoint that `find_checkpoint` returns into the folder `aside`.

    If a running run removes it meanwhile, the search starts again.

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
    """Converts a checkpoint to the universal format, which any number of ranks can load.

    The result is verified like any other checkpoint, and stays until the next one is written.
    """
    from rlx.learner import convert_checkpoints  # imports torch

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
    """Reads the state of a checkpoint.

    Raises:
        CheckpointError: another version of rlx wrote it.
    """
    state = json.loads((folder / STATE).read_text())
    try:
        return RunState(**state)
    except TypeError as error:
        version = state.get("version")
        raise CheckpointError(
            f"checkpoint {folder.name} was written by rlx {version}; this is rlx {__version__}"
        ) from error


def load_checkpoint(
    folder: Path, learner: "Learner", critic: "Critic | None", *, universal: bool = False
) -> None:
    """Loads weights and optimizers; every rank calls it, after one rank has verified the folder.

    Args:
        universal: whether the folder was made by `convert_checkpoint`.
    """
    learner.engine.load(folder / POLICY, universal=universal)
    if critic is not None:
        critic.engine.load(folder / CRITIC, universal=universal)


def write_weights(
    spec: ExperimentSpec, checkpoint: Path, folder: Path, tokenizer: Path | None = None
) -> None:
    """Writes a checkpoint's policy in the Hugging Face layout, as a finished run exports its model.

    Raises:
        RlxError: the checkpoint holds another model.
        DivergedModelError: its weights, or the logits that they give, are not finite.
        EnvironmentFault: files of the base model are missing.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed probes for devices and logs it
    with speed_up_imports():
        import torch
        from transformers.utils.logging import disable_progress_bar

        from rlx.learner import load_consolidated_weights
        from rlx.model import (
            adapt_policy,
            adapter_weights,
            build_policy,
            iterate_merged_weights,
            write_model,
        )

    disable_progress_bar()
    dtype = getattr(torch, read_state(checkpoint).dtype)
    policy = build_policy(spec.model, spec.seed, tokenizer, dtype=dtype)
    adapt_policy(policy, spec.model, spec.seed)
    stored = load_consolidated_weights(checkpoint / POLICY)  # of a `PackedPolicy`, with its prefix
    try:
        policy.model.load_state_dict({n.removeprefix("model."): w for n, w in stored.items()})
    except RuntimeError as error:
        raise RlxError(f"{checkpoint.name} belongs to another model: {error}") from error
    weights = dict(iterate_merged_weights(policy.model))
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[0, 1]])).logits
    for name, value in {**weights, "logits": logits}.items():
        if not value.isfinite().all():
            what = f"its {name} has values that are not finite"
            raise DivergedModelError(f"{checkpoint.name} is not sound: {what}")
    write_model(policy, weights, adapter_weights(policy.model), folder)


HERE: KeyPath = ("from_checkpoint",)


def pin_checkpoint(registry: Registry, read: LoadedSpec) -> LoadedSpec:
    """Resolves and checks `from_checkpoint` of an experiment, if it has one.

    A run name and `latest` are replaced by the run's id and the step, so that the spec's digest
    identifies one checkpoint.

    Raises:
        InvalidSpec: the checkpoint is missing, damaged, or does not fit the experiment.
    """
    reference = read.spec.from_checkpoint
    if reference is None:
        return read
    ref, _, step = reference.partition("@")
    try:
        run = registry.run(ref)
        root = _get_run_folder(run).checkpoints
        if run.status == "finished" and not root.exists():
            raise CheckpointError(
                f"{run.id} has finished and kept no checkpoint: runner.checkpoint.keep_finished"
            )
        folder = find_checkpoint(root, step, _get_recorded_digests(registry, run))
        state = read_state(folder)
    except (NotFoundError, AmbiguousNameError, CheckpointError) as error:
        why = escape_unprintable(str(error)).removesuffix(".")
        name = escape_unprintable(reference)
        message = f"from_checkpoint is '{name}', which is not available: {why}"
        faults = [build_error(HERE, message, kind="value")]
    else:
        faults = [*_check_origin_fit(read.spec, run, folder, state)]
    if faults:
        raise read.document.build_refusal(faults)
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


def _check_origin_fit(
    spec: ExperimentSpec, run: RunRecord, folder: Path, state: RunState
) -> Iterator[Diagnostic]:
    """Reasons why an experiment cannot start from a checkpoint."""
    if state.step >= spec.steps:
        taken = f"{run.id} had already taken {state.step} at the checkpoint"
        message = f"phases have {spec.steps} steps, but {taken}: no steps remain"
        advice = "steps are counted from that run's first step"
        yield build_error(("phases",), message, advice, against=HERE)
    ours, theirs = dict(spec.dump_resolved()["model"]), dict(run.spec["model"])
    for model in (ours, theirs):  # another reference changes no weight
        model.pop("reference", None)
    if None in (ours.get("tokenizer", ""), theirs.get("tokenizer", "")):
        ours["tokenizer"] = theirs["tokenizer"]  # null takes the tokenizer of the checkpoint's run
    differences = dict(_find_differences(ours, theirs, ("model",)))
    for path, (mine, other) in sorted(differences.items()):
        name = format_key_path(path)
        message = f"{name} is {mine!r}, but {run.id} trained a model with {other!r}"
        yield build_error(path, message, "use the checkpoint's model", against=HERE)
    if refused := state.find_load_conflict(spec.runner):
        key, why = refused
        yield build_error(
            ("runner", key), f"runner.{key} {why}", f"use the {key} of {run.id}", against=HERE
        )

    if (folder / CRITIC).is_dir() and spec.critic is None:
        message = f"the checkpoint of {run.id} has a critic, but the experiment has none"
        yield build_error(("critic",), message, "add `critic`, as in that run", against=HERE)
    if spec.critic is not None and not (folder / CRITIC).is_dir():
        message = f"the experiment has a critic, but the checkpoint of {run.id} has none"
        advice = "remove `critic`, or start from a run that had one"
        yield build_error(("critic",), message, advice, against=HERE)


def _find_differences(
    ours: Any, theirs: Any, path: KeyPath
) -> Iterator[tuple[KeyPath, tuple[Any, Any]]]:
    """Key paths at which two resolved sections differ, with the value of each."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours.keys() | theirs.keys():
            yield from _find_differences(ours.get(key), theirs.get(key), (*path, key))
    elif ours != theirs:
        yield path, (ours, theirs)


def _get_run_folder(run: RunRecord) -> RunFolder:
    if run.directory is None:
        raise CheckpointError(f"{run.id} has no folder: its submission was interrupted")
    return RunFolder(Path(run.directory))


def _get_recorded_digests(registry: Registry, run: RunRecord) -> Recorded:
    return {c.step: c.sha256 for c in registry.results.checkpoints(run.id)}
