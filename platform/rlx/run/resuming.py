"""Where a run stands, written down between its steps and taken up again."""

from dataclasses import dataclass

from rlx.errors import RlxError
from rlx.run.carried import Carried
from rlx.run.checkpoint import RunState, newest, read_state, restore, write
from rlx.run.machinery import Machinery
from rlx.spec import ExperimentSpec

__all__ = ["Progressed", "due", "keep", "resume"]


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far a run is.

    Attributes:
        step: the last one taken.
        cursor: problems drawn.
        learned: steps in which some rollout could be scored.
        phase: number of the phase that it is in, from 0.
        done: steps of that phase.
        carried: what the next step is handed.
    """

    step: int = 0
    cursor: int = 0
    learned: int = 0
    phase: int = 0
    done: int = 0
    carried: Carried | None = None


def due(spec: ExperimentSpec, step: int) -> bool:
    """Whether a checkpoint follows this step."""
    every = spec.runner.checkpoint.every
    return every > 0 and (step % every == 0 or step == spec.steps)


def keep(m: Machinery, at: Progressed) -> None:
    """Writes a checkpoint and records it."""
    if at.carried is None:
        raise ValueError("nothing has been trained yet")
    state = RunState(
        step=at.step,
        cursor=at.cursor,
        learned=at.learned,
        phase=at.phase,
        done=at.done,
        beta=at.carried.kl.beta,
        states=at.carried.states,
        critic=at.carried.critic,
        ranks=m.ranks.count,
        digest=m.spec.digest,
    )
    root, spec = m.folder.checkpoints, m.spec.runner.checkpoint
    written = write(root, state, m.learner, m.critic, m.ranks, keep=spec.keep)
    if m.recorder and written:
        m.recorder.checkpoint(at.step, written.path, written.sha256, written.bytes)


def resume(m: Machinery) -> Progressed | None:
    """Loads the newest sound checkpoint; None where there is none. Every rank calls it.

    Raises:
        RlxError: it was written by another number of ranks, or for another experiment.
    """

    def tell(what: str) -> None:
        if m.recorder:
            m.recorder.event("checkpoint_refused", what, level="warning")
            print(what, flush=True)

    found, *_ = m.ranks.gather(newest(m.folder.checkpoints, tell) if m.ranks.is_first else None)
    if found is None:
        return None
    state = read_state(found)
    if state.digest != m.spec.digest:
        raise RlxError(f"checkpoint {found.name} is of another experiment, {state.digest}")
    if state.ranks != m.ranks.count:
        raise RlxError(
            f"checkpoint {found.name} was written by {state.ranks} ranks, and these are "
            f"{m.ranks.count}: go on with as many"
        )
    restore(found, m.learner, m.critic)
    if m.recorder:
        m.recorder.event("resumed", f"goes on after step {state.step}", step=state.step)
        print(f"resumed after step {state.step}", flush=True)
    credit = m.spec.in_phase(m.spec.phases[state.phase]).credit
    carried = Carried.resume(credit, state.beta, state.states, state.critic)
    return Progressed(state.step, state.cursor, state.learned, state.phase, state.done, carried)
