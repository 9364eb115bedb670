"""Writes the checkpoints of a run, and resumes the run from them."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlx.checkpoint import (
    RunState,
    convert_checkpoint,
    find_by_shared_hashing,
    find_newest_checkpoint,
    load_checkpoint,
    read_state,
    write_checkpoint,
)
from rlx.errors import RlxError
from rlx.run.context import ControllerState, RunContext
from rlx.sealed_folder import CheckpointError, ComputeDigests
from rlx.spec import ExperimentSpec


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The position of a run between two steps.

    Attributes:
        step: the last completed step.
        cursor: number of problems drawn.
        learned: number of steps in which some rollout could be scored.
        phase: index of the current phase, from 0.
        done: number of completed steps of that phase.
        controllers: state for the next step; None before the first.
        forked: whether another run took all these steps.
    """

    step: int = 0
    cursor: int = 0
    learned: int = 0
    phase: int = 0
    done: int = 0
    controllers: ControllerState | None = None
    forked: bool = False


def is_checkpoint_due(spec: ExperimentSpec, step: int) -> bool:
    """Whether a checkpoint is due after this step."""
    every = spec.runner.checkpoint.every
    return every > 0 and (step % every == 0 or step == spec.steps)


def checkpoint_run(context: RunContext, at: ResumePoint) -> None:
    """Writes a checkpoint and records it.

    Raises:
        ValueError: no step has been trained yet.
    """
    if at.controllers is None:
        raise ValueError("nothing has been trained yet")
    if context.recorder:
        context.recorder.finish_step()  # or a resumed run would lack the record of this step
    context.progress.show_activity("checkpoint")
    began = time.perf_counter()
    state = RunState(
        step=at.step,
        cursor=at.cursor,
        learned=at.learned,
        phase=at.phase,
        done=at.done,
        beta=at.controllers.adaptive_beta,
        states=at.controllers.states,
        critic=at.controllers.critic,
        ranks=context.ranks.count,
        zero_stage=context.spec.runner.zero_stage,
        dtype=context.spec.runner.dtype,
        digest=context.spec.digest,
    )
    root, count = context.folder.checkpoints, context.spec.runner.checkpoint.keep
    written = write_checkpoint(
        root, state, context.learner, context.critic, context.ranks, keep=count
    )
    if context.recorder and written:
        context.recorder.checkpoint(at.step, written.path, written.sha256, written.bytes)
        context.recorder.record_durations(
            at.step, {"perf/checkpoint_s": time.perf_counter() - began}
        )


def resume_run(context: RunContext) -> ResumePoint | None:
    """Loads the newest intact checkpoint of the run, else the one that the run is forked from.

    Every rank calls it.

    Returns:
        The position of the run; None if it starts from its initial model.

    Raises:
        RlxError: the checkpoint was written for another experiment or in another precision.
        CheckpointError: the checkpoint of the other run is damaged.
    """
    place = find_by_shared_hashing(partial(_find_resume_checkpoint, context), context.ranks)
    if place is None:
        return None
    return _resume_from(context, context.folder.root / place)


def _resume_from(context: RunContext, found: Path) -> ResumePoint:
    """Loads a checkpoint that every rank sees."""
    state, forked = read_state(found), found.parent == context.folder.origin
    if not forked and state.digest != context.spec.digest:
        raise RlxError(f"checkpoint {found.name} belongs to another experiment, {state.digest}")
    runner = context.spec.runner
    if refused := state.find_load_conflict(runner):
        raise RlxError(f"checkpoint {found.name} cannot be loaded: runner.{' '.join(refused)}")
    otherwise, source = state.needs_conversion(context.ranks.count, runner), found
    if otherwise and context.ranks.is_first:
        context.progress.show_activity("conversion of the checkpoint")
        source = convert_checkpoint(found, context.folder.checkpoints)
    name, *_ = context.ranks.gather(source.name)
    source = context.folder.checkpoints / name if otherwise else found
    load_checkpoint(source, context.learner, context.critic, universal=otherwise)
    _record_resumption(context, state, forked=forked, otherwise=otherwise)
    number, done = context.spec.place(state.step) if forked else (state.phase, state.done)
    credit = context.spec.resolve_phase_spec(context.spec.phases[number]).credit
    controllers = ControllerState.resume(credit, state.beta, state.states, state.critic)
    return ResumePoint(state.step, state.cursor, state.learned, number, done, controllers, forked)


def _find_resume_checkpoint(context: RunContext, compute: ComputeDigests) -> Path | None:
    """Finds the checkpoint to resume from, by its path in the run's folder; rank 0 calls it."""

    def report_refusal(what: str) -> None:
        if context.recorder:
            context.recorder.event("checkpoint_refused", what, level="warning")
            print(what, flush=True)

    recorded = context.recorder.list_checkpoint_digests() if context.recorder else {}
    found = find_newest_checkpoint(context.folder.checkpoints, recorded, report_refusal, compute)
    if found is None and context.spec.from_checkpoint is not None:
        found = find_newest_checkpoint(context.folder.origin, {}, report_refusal, compute)
        if found is None:
            raise CheckpointError(
                f"the copy of {context.spec.from_checkpoint} in {context.folder.origin} is "
                "damaged, and there is no other checkpoint to resume from: submit the experiment "
                "again"
            )
    return found and found.relative_to(context.folder.root)


def _record_resumption(
    context: RunContext, state: RunState, *, forked: bool, otherwise: bool
) -> None:
    if context.recorder is None:
        return
    kind, message = "resumed", f"continues after step {state.step}"
    if forked:
        kind, message = "forked", f"continues from {context.spec.from_checkpoint}"
    if otherwise:
        wrote = "one rank" if state.ranks == 1 else f"{state.ranks} ranks"
        message += f", written by {wrote} under ZeRO stage {state.zero_stage}"
    context.recorder.event(kind, message, step=state.step)
    print(message, flush=True)
