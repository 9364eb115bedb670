"""What a run does before its first step: the warm start, and the first contact.

A warm start is trained by one rank alone, or by all ranks that share the weights together.
Rank 0 alone trains it if that fits on its device, so that the result does not depend on the number
of ranks, and runs of any number of ranks find it in the cache. A larger model is trained by all
ranks under ZeRO stage 3. Sums over rows then have another order, which changes last bits: such a
result has a cache entry of its own. What fits on no device is trained on the CPU.

In a first contact, a pretrained model answers a few problems before it is trained.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.errors import EnvironmentFault, RewardError
from rlx.evaluation import FirstContact, describe_first_contact
from rlx.home import WARM_STARTS, get_rlx_home
from rlx.model import (
    DemonstrationBatches,
    Policy,
    SharedTraining,
    WarmStartProgress,
    build_demonstration_batches,
    fits_warm_start,
    is_shipped_warm_start,
    read_warm_start_losses,
    warm_start_policy,
)
from rlx.phase_setup import PhaseSetup
from rlx.plugin import Problem
from rlx.plugin_output import show_plugin_output
from rlx.record import Recorder
from rlx.run.collect import build_prompt_fit, sample_and_score
from rlx.run.context import RunContext
from rlx.run.progress import Progress, ProgressFile
from rlx.sealed_folder import compute_manifest_digest
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec

if TYPE_CHECKING:  # it imports DeepSpeed, which a first contact outside of a run has no use for
    from rlx.learner import Ranks

POINTS = 100
"""Points of the curve of a warm start's loss, about."""
LINES = 10
"""Times that a warm start's losses are recorded, about, each with a line of the log."""


def start_warm(
    spec: ExperimentSpec,
    setup: PhaseSetup,
    policy: Policy,
    ranks: "Ranks",
    progress: ProgressFile,
    recorder: Recorder | None,
) -> None:
    """Trains a policy on demonstrations, if the experiment has a warm start, or loads what an
    earlier run has trained; every rank calls it.

    Args:
        policy: in float32; its weights are replaced.
    """
    trained, losses = 0, dict[int, float]()

    def report_step(done: int, total: int, loss: float) -> None:
        nonlocal trained
        trained = done
        progress.show(Progress("warm start", done, total, f"loss {loss:.3f}"))
        if _is_point(done, total, POINTS):
            losses[done] = loss
        if recorder and _is_point(done, total, LINES):
            recorder.warm_start(losses, total)
            losses.clear()
            print(f"warm start  step {done}/{total}  loss {loss:.3f}", flush=True)

    def report_damage(message: str) -> None:
        if recorder:
            recorder.event("warm_start_refused", message, level="warning")
        print(message, flush=True)

    cache = get_rlx_home() / WARM_STARTS
    cache.mkdir(parents=True, exist_ok=True)
    start: Callable[..., Path | None] = partial(
        warm_start_policy,
        *(policy, spec, setup.demonstrations, cache, report_step),
        *(setup.environment, report_damage, ranks.device),
    )
    is_shared = _is_shared(policy, spec, ranks)
    if is_shared:
        started, start = _start_together(spec, setup, policy, ranks, start)
    else:
        started = start() if ranks.is_first else None
    ranks.barrier()
    if not ranks.is_first:
        start()
    if recorder and started:
        _record_start(recorder, started, ranks.count if is_shared else 1, reused=not trained)


def _is_shared(policy: Policy, spec: ExperimentSpec, ranks: "Ranks") -> bool:
    """Whether all ranks train together, since rank 0 alone cannot."""
    wanted = spec.model.warm_start is not None and spec.runner.zero_stage == 3 and ranks.count > 1
    return (
        wanted
        and ranks.gather(
            not fits_warm_start(policy, ranks.device)
            and fits_warm_start(policy, ranks.device, ranks.count)
        )[0]
    )


def _start_together(
    spec: ExperimentSpec,
    setup: PhaseSetup,
    policy: Policy,
    ranks: "Ranks",
    start: Callable[..., Path | None],
) -> tuple[Path | None, Callable[[], Path | None]]:
    """Rank 0 looks into the cache. If it has to train, the others help it.

    Returns:
        What rank 0 has started from; how the others load it.
    """
    from rlx.learner import train_on_demonstrations

    runner = spec.runner
    keys = ("micro_batch_tokens", "offload_optimizer")
    identity = {"ranks": ranks.count, **runner.model_dump(include=set(keys))}

    def lead(policy: Policy, batches: DemonstrationBatches, progress: WarmStartProgress) -> None:
        ranks.gather(True)
        train_on_demonstrations(policy, batches, progress, runner, ranks)

    def refuse(*_: object) -> None:
        raise EnvironmentFault(
            f"rank {ranks.rank} does not find the warm start that rank 0 has saved: RLX_HOME must "
            "be on a disk that all machines of a run share"
        )

    load = partial(start, shared=SharedTraining(refuse, identity))
    if ranks.is_first:
        started = start(shared=SharedTraining(lead, identity))
        ranks.gather(False)
        return started, load
    while any(ranks.gather(False)):
        batches = build_demonstration_batches(policy, spec, setup.demonstrations, setup.environment)
        train_on_demonstrations(policy, batches, lambda *_: None, runner, ranks)
    return None, load


def _record_start(recorder: Recorder, folder: Path, ranks: int, *, reused: bool) -> None:
    if reused:  # an earlier run has trained it
        losses = dict(enumerate(read_warm_start_losses(folder), start=1))
        total = len(losses)
        if points := {n: loss for n, loss in losses.items() if _is_point(n, total, POINTS)}:
            recorder.warm_start(points, total)
        origin = "that are shipped" if is_shipped_warm_start(folder) else "of an earlier run"
        print(f"warm start  {total} steps {origin} are reused", flush=True)
    recorder.phase("before training")
    message = f"begins with warm start {folder.name}"
    if ranks > 1:
        message += f", which {ranks} ranks have trained together"
    sha256 = compute_manifest_digest(folder)
    recorder.event("warm_start", message, path=f"{WARM_STARTS}/{folder.name}", sha256=sha256)


def _is_point(done: int, total: int, points: int) -> bool:
    """Whether a step is the first, the last or one of about `points` steps between them."""
    return done in (1, total) or done % max(1, total // points) == 0


PROMPTS, MOST_PROMPTS = 8, 32
"""Problems of a first contact, and of one in which the first ones carry no signal, if a step does
not have more: where one answer in a hundred is right, eight problems may well have none."""


def draw_contact_problems(
    policy: Policy, setup: PhaseSetup, count: int
) -> tuple[Sequence[Problem], list[int]]:
    """Draws the first training problems that fit the model, with a sampling seed for each."""
    seed, data = setup.spec.seed, derive_seed(setup.spec.seed, "train")
    with show_plugin_output(setup.spec.task.plugin):
        drawn = build_prompt_fit(policy, setup).draw_train(
            lambda number: setup.task.problem("train", number, data), 0, count
        )
    return drawn.problems, [derive_seed(seed, "first contact", n) for n in drawn.numbers]


def make_first_contact(context: RunContext, setup: PhaseSetup) -> FirstContact:
    """Has the model answer training problems, records what came of it, and learns nothing.

    Raises:
        RewardError: no group has a signal, and the run was not submitted with `--anyway`.
    """
    context.progress.show(Progress("first contact", 0, PROMPTS))
    found = _try_problems(context, setup, PROMPTS)
    if not found.has_signal:
        most = max(MOST_PROMPTS, setup.spec.rollout.prompts_per_step)
        context.progress.show(Progress("first contact", PROMPTS, most))
        found = _try_problems(context, setup, most)
    stops = not found.has_signal and not context.folder.anyway.exists()
    if context.recorder:
        level = "info" if found.has_signal else "warning"
        context.recorder.event("first_contact", found.summarize(), level=level, **found.to_json())
        print("\n".join(found.list_lines()), flush=True)
    if stops:
        context.ranks.gather(None)  # the first rank has recorded what came of it
        change = f"; {found.advice[0]}" if found.advice else ""
        raise RewardError(
            "first contact: the model's answers carry no signal, so no step would learn: "
            f"{found.summarize()}{change}. `rlx logs` shows samples and what to change; "
            "`rlx submit --anyway` trains all the same"
        )
    return found


def _try_problems(context: RunContext, setup: PhaseSetup, count: int) -> FirstContact:
    """Samples, scores and describes the phase's rollouts of the first training problems."""
    problems, seeds = draw_contact_problems(context.policy, setup, count)
    rollouts = sample_and_score(context, setup, setup.plan, problems, seeds)
    decode = context.policy.dialogue.decode_tokens
    return describe_first_contact(setup, rollouts.trees, rollouts.table, decode)
