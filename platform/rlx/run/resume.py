"""Where a run stands, written down between its steps and taken up again."""

import pickle
import time
from dataclasses import dataclass
from pathlib import Path

from rlx.checkpoint.sealing import CheckpointError
from rlx.checkpoint.store import (
    RunState,
    convert_checkpoint,
    find_newest_checkpoint,
    load_checkpoint,
    read_in_flight_bytes,
    read_state,
    write_checkpoint,
)
from rlx.errors import RlxError
from rlx.run.collect import StepRollouts
from rlx.run.controller_state import ControllerState
from rlx.run.run_context import RunContext
from rlx.spec import ExperimentSpec

__all__ = ["ResumePoint", "checkpoint_run", "is_checkpoint_due", "resume_run"]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """How far a run is.

    Attributes:
        step: the last one taken.
        cursor: problems drawn.
        learned: steps in which some rollout could be scored.
        phase: number of the phase that it is in, from 0.
        done: steps of that phase.
        carried: what the next step is handed.
        forked: another run has taken all these steps.
    """

    step: int = 0
    cursor: int = 0
    learned: int = 0
    phase: int = 0
    done: int = 0
    carried: ControllerState | None = None
    forked: bool = False


def is_checkpoint_due(spec: ExperimentSpec, step: int) -> bool:
    """Whether a checkpoint follows this step."""
    every = spec.runner.checkpoint.every
    return every > 0 and (step % every == 0 or step == spec.steps)


def checkpoint_run(m: RunContext, at: ResumePoint) -> None:
    """Writes a checkpoint and records it."""
    if at.carried is None:
        raise ValueError("nothing has been trained yet")
    m.ahead.finish(m)
    m.progress.show_activity("checkpoint")
    began = time.perf_counter()
    state = RunState(
        step=at.step,
        cursor=at.cursor,
        learned=at.learned,
        phase=at.phase,
        done=at.done,
        beta=at.carried.adaptive_beta,
        states=at.carried.states,
        critic=at.carried.critic,
        ranks=m.ranks.count,
        zero_stage=m.spec.runner.zero_stage,
        dtype=m.spec.runner.dtype,
        digest=m.spec.digest,
    )
    root, count = m.folder.checkpoints, m.spec.runner.checkpoint.keep
    ahead = None if m.ahead.ready is None else pickle.dumps(m.ahead.ready)
    written = write_checkpoint(
        root, state, m.learner, m.critic, m.ranks, keep=count, in_flight=ahead
    )
    if m.recorder and written:
        m.recorder.checkpoint(at.step, written.path, written.sha256, written.bytes)
        m.recorder.record_durations(at.step, {"perf/checkpoint_s": time.perf_counter() - began})


def resume_run(m: RunContext) -> ResumePoint | None:
    """Loads the newest sound checkpoint, else that of the run that this one goes on from.

    Every rank calls it.

    Returns:
        How far the run is; None where it begins from its model as it is.

    Raises:
        RlxError: what is there was written for another experiment or in another precision.
        CheckpointError: the other run's checkpoint is damaged.
    """
    found, *_ = m.ranks.gather(_find_resume_checkpoint(m) if m.ranks.is_first else None)
    if found is None:
        return None
    state, forked = read_state(found), found.parent == m.folder.origin
    if not forked and state.digest != m.spec.digest:
        raise RlxError(f"checkpoint {found.name} is of another experiment, {state.digest}")
    runner = m.spec.runner
    if refused := state.find_load_conflict(runner):
        raise RlxError(f"checkpoint {found.name} cannot be loaded: runner.{' '.join(refused)}")
    otherwise, source = state.needs_conversion(m.ranks.count, runner), found
    if otherwise and m.ranks.is_first:
        m.progress.show_activity("conversion of the checkpoint")
        source = convert_checkpoint(found, m.folder.checkpoints)
    source, *_ = m.ranks.gather(source)
    load_checkpoint(source, m.learner, m.critic, universal=otherwise)
    ahead = (
        None if forked else read_in_flight_bytes(found)
    )  # another experiment's rollouts are not ours
    if ahead is not None:
        m.ahead.restore_rollouts(_unpickle_rollouts(ahead))
    _record_resumption(m, state, forked=forked, otherwise=otherwise)
    number, done = m.spec.place(state.step) if forked else (state.phase, state.done)
    credit = m.spec.resolve_phase_spec(m.spec.phases[number]).credit
    carried = ControllerState.resume(credit, state.beta, state.states, state.critic)
    return ResumePoint(state.step, state.cursor, state.learned, number, done, carried, forked)


def _find_resume_checkpoint(m: RunContext) -> Path | None:
    """The checkpoint to go on from; rank 0 calls it."""

    def report_refusal(what: str) -> None:
        if m.recorder:
            m.recorder.event("checkpoint_refused", what, level="warning")
            print(what, flush=True)

    recorded = m.recorder.list_checkpoint_digests() if m.recorder else {}
    found = find_newest_checkpoint(m.folder.checkpoints, recorded, report_refusal)
    if found is None and m.spec.from_checkpoint is not None:
        found = find_newest_checkpoint(m.folder.origin, {}, report_refusal)
        if found is None:
            raise CheckpointError(
                f"the copy of {m.spec.from_checkpoint} in {m.folder.origin} is damaged, and there "
                "is nothing else to go on from: submit the experiment again"
            )
    return found


def _unpickle_rollouts(kept: bytes) -> StepRollouts:
    """Rollouts in flight, as `keep` wrote them.

    Raises:
        CheckpointError: another version of rlx wrote them.
    """
    try:
        found = pickle.loads(kept)
    except (pickle.UnpicklingError, AttributeError, ImportError, TypeError) as error:
        raise CheckpointError(
            f"the rollouts in flight were written by another version of rlx ({error}): go on with "
            "that one, or fork the run with --from-checkpoint, which samples them again"
        ) from error
    if not isinstance(found, StepRollouts):
        raise CheckpointError("what is kept as rollouts in flight is something else")
    return found


def _record_resumption(m: RunContext, state: RunState, *, forked: bool, otherwise: bool) -> None:
    if m.recorder is None:
        return
    kind, told = "resumed", f"goes on after step {state.step}"
    if forked:
        kind, told = "forked", f"goes on from {m.spec.from_checkpoint}"
    if otherwise:
        wrote = "one rank" if state.ranks == 1 else f"{state.ranks} ranks"
        told += f", which {wrote} wrote under ZeRO stage {state.zero_stage}"
    m.recorder.event(kind, told, step=state.step)
    print(told, flush=True)
