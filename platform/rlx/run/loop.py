"""Runs an experiment on one rank: build or resume, warm start, first contact, evaluate, train with
checkpoints, evaluate, export.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rlx.checkpoint import (
    RunState,
    convert_checkpoint,
    find_newest_checkpoint,
    load_checkpoint,
    read_state,
    write_checkpoint,
)
from rlx.errors import RewardError, RlxError
from rlx.evaluation import FirstContact, compute_held_out_metrics, describe_first_contact
from rlx.home import WARM_STARTS, RunFolder, get_rlx_home
from rlx.learner import (
    Critic,
    Learner,
    Ranks,
    ReferencePolicy,
    build_learner_with_reference,
    learning_rate,
)
from rlx.model import (
    Policy,
    adapt_policy,
    build_policy,
    build_reference,
    convert_weights,
    is_shipped_warm_start,
    read_warm_start_losses,
    warm_start_policy,
)
from rlx.phase_setup import PhaseSetup, build_setup
from rlx.plugin import Task, sum_costs
from rlx.progress import Progress, ProgressFile
from rlx.record import Recorder
from rlx.reward import RewardPool
from rlx.rollout import RolloutPlan
from rlx.run.context import ControllerState, CpuAccount, RunContext, RunStopped, StopRequest
from rlx.run.metrics import AlarmWatch, environment_figures
from rlx.run.probes import require_texts, run_probe
from rlx.run.training import (
    build_prompt_fit,
    draw_contact_problems,
    draw_held_out_problems,
    sample_and_score,
    train_step,
)
from rlx.run.weight_sync import synchronize_sampler
from rlx.sampler import expect_dialogue_length, open_sampler, require_engine
from rlx.sealed_folder import CheckpointError, compute_manifest_digest
from rlx.spec import ExperimentSpec, PretrainedModelSpec

CONTACT_PROMPTS, MOST_CONTACT_PROMPTS = 8, 32
"""Problems of a first contact, and of one in which the first ones carry no signal, if a step does
not have more: where one answer in a hundred is right, eight problems may well have none."""


def make_first_contact(context: RunContext, setup: PhaseSetup) -> FirstContact:
    """Has the model answer training problems, records what came of it, and learns nothing.

    Raises:
        RewardError: no group has a signal, and the run was not submitted with `--anyway`.
    """
    context.progress.show(Progress("first contact", 0, CONTACT_PROMPTS))
    found = _try_problems(context, setup, CONTACT_PROMPTS)
    if not found.has_signal:
        most = max(MOST_CONTACT_PROMPTS, setup.spec.rollout.prompts_per_step)
        context.progress.show(Progress("first contact", CONTACT_PROMPTS, most))
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
    problems, seeds = draw_contact_problems(context.policy, setup, count)
    rollouts = sample_and_score(context, setup, setup.plan, problems, seeds)
    decode = context.policy.dialogue.decode_tokens
    return describe_first_contact(setup, rollouts.trees, rollouts.table, decode)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The position of a run between two steps, as in `RunState`.

    Attributes:
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


def checkpoint_run(context: RunContext, at: ResumePoint) -> None:
    """Writes a checkpoint of a trained step and records it."""
    assert at.controllers is not None
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
    root, keep = context.folder.checkpoints, context.spec.runner.checkpoint.keep
    models = context.learner, context.critic
    written = write_checkpoint(root, state, *models, context.ranks, keep=keep)
    if context.recorder and written:
        context.recorder.checkpoint(at.step, written.path, written.sha256, written.bytes)
        took = {"perf/checkpoint_s": time.perf_counter() - began}
        context.recorder.record_durations(at.step, took)


def resume_run(context: RunContext) -> ResumePoint | None:
    """Loads the newest intact checkpoint of the run, else the one that the run is forked from.

    Every rank calls it.

    Returns:
        The position of the run; None if it starts from its initial model.

    Raises:
        RlxError: the checkpoint was written for another experiment or in another precision.
        CheckpointError: the checkpoint of the other run is damaged.
    """
    found: Path | CheckpointError | None = None
    if context.ranks.is_first:
        try:
            found = _find_resume_checkpoint(context)
        except CheckpointError as error:
            found = error
    found, *_ = context.ranks.gather(found)
    if isinstance(found, CheckpointError):
        raise found
    return None if found is None else _resume_from(context, context.folder.root / found)


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
    if context.recorder:
        kind, message = "resumed", f"continues after step {state.step}"
        if forked:
            kind, message = "forked", f"continues from {context.spec.from_checkpoint}"
        if otherwise:
            wrote = "one rank" if state.ranks == 1 else f"{state.ranks} ranks"
            message += f", written by {wrote} under ZeRO stage {state.zero_stage}"
        context.recorder.announce(kind, message, "info", step=state.step)
    number, done = context.spec.place(state.step) if forked else (state.phase, state.done)
    credit = context.spec.resolve_phase_spec(context.spec.phases[number]).credit
    controllers = ControllerState.resume(credit, state.beta, state.states, state.critic)
    return ResumePoint(state.step, state.cursor, state.learned, number, done, controllers, forked)


def _find_resume_checkpoint(context: RunContext) -> Path | None:
    """Finds the checkpoint to resume from, by its path in the run's folder; rank 0 calls it."""

    def report_refusal(what: str) -> None:
        if context.recorder:
            context.recorder.announce("checkpoint_refused", what)

    recorded = context.recorder.list_checkpoint_digests() if context.recorder else {}
    found = find_newest_checkpoint(context.folder.checkpoints, recorded, report_refusal)
    if found is None and context.spec.from_checkpoint is not None:
        found = find_newest_checkpoint(context.folder.origin, {}, report_refusal)
        if found is None:
            raise CheckpointError(
                f"the copy of {context.spec.from_checkpoint} in {context.folder.origin} is "
                "damaged, and there is no other checkpoint to resume from: submit the experiment "
                "again"
            )
    return found and found.relative_to(context.folder.root)


def run_experiment(
    spec: ExperimentSpec,
    folder: RunFolder,
    ranks: Ranks,
    recorder: Recorder | None,
    stop: StopRequest,
) -> None:
    """Runs an experiment from its start, or from its newest checkpoint, to its end.

    Raises:
        RunStopped: a stop was requested; a checkpoint of the last step has been written.
        RewardError: no step could learn, because no rollout was ever scored, or because the first
            contact of a pretrained model shows no signal.
    """
    require_engine(spec.sampler)
    progress = ProgressFile(folder.progress if ranks.is_first else None)
    base = build_setup(spec)
    runner = spec.runner
    workers, memory = runner.reward_workers, runner.reward_memory_mb
    with (
        RewardPool(workers, memory, folder.answers(ranks.rank)) as pool,
        ExitStack() as ending,
    ):
        policy = _start_model(spec, base, folder, ranks, progress, recorder)
        progress.show_activity("sampler")
        settings = spec.sampler.for_length(expect_dialogue_length(spec))
        sampler = ending.enter_context(open_sampler(policy, settings, runner, ranks.device))
        sampler.release()  # its memory, to the learner
        phases = [build_setup(spec.resolve_phase_spec(phase)) for phase in spec.phases]
        progress.show_activity("learner")
        critic = None
        if spec.critic is not None and any("values" in setup.needs for setup in phases):
            critic = Critic(policy, runner, spec.critic, ranks, spec.seed)
        learner, reference = _build_learner(spec, policy, phases, ranks, recorder)

        def count_cpu_seconds() -> float:
            """Of this process without the thread that records, and of its workers."""
            recording = recorder.cpu_seconds if recorder else 0.0
            return time.process_time() - recording + pool.cpu_seconds

        context = RunContext(
            *(spec, folder, ranks, policy, sampler, learner, critic, reference),
            *(pool, recorder, progress, CpuAccount(count_cpu_seconds)),
        )
        if recorder:
            level = "info" if learner.chosen.form.merges else "warning"
            recorder.event("forms", f"learner: {learner.chosen}", level=level)
            recorder.event("forms", f"sampler: {sampler.description}")
            print(f"learner: {learner.chosen}\nsampler: {sampler.description}", flush=True)
        resumed = resume_run(context)
        at = resumed or ResumePoint()
        synchronize_sampler(context)
        if resumed is None and isinstance(spec.model, PretrainedModelSpec):
            with context.cpu.measure("evaluate"):
                make_first_contact(context, phases[0])
        if resumed is None or resumed.forked:
            _evaluate_held_out(context, base, step=at.step, label="before")
            if spec.probe is not None and spec.probe.every:
                run_probe(context, base, step=at.step, label="before")
        with stop.defer_exit():
            for number in range(at.phase, len(spec.phases)):
                at = _train_phase(context, base, number, at, stop)
        if not at.learned:
            raise RewardError(
                "no step learned anything because no rollout could be scored; `rlx logs RUN` "
                "shows the first scoring failure of every step"
            )
        _evaluate_held_out(context, base, step=at.step, label="after")
        learner.export(policy, folder.model)
        run_probe(context, base, step=at.step, label="after")


def _build_learner(
    spec: ExperimentSpec,
    policy: Policy,
    phases: Sequence[PhaseSetup],
    ranks: Ranks,
    recorder: Recorder | None,
) -> tuple[Learner, ReferencePolicy | None]:
    """Builds the learner, and the reference policy if some phase uses the KL divergence from it."""
    learned = adapt_policy(policy, spec.model, spec.seed)
    if not any("reference_logprobs" in setup.needs for setup in phases):
        return Learner(learned, spec.runner, spec.optimizer, ranks), None
    source, teacher = spec.model.reference, None
    if source is not None:
        teacher = build_reference(source, policy, getattr(torch, spec.runner.dtype))
    learner, reference = build_learner_with_reference(
        learned, spec.runner, spec.optimizer, ranks, teacher
    )
    if recorder:
        path = "" if source is None else f": {source.path}"
        recorder.event("reference", f"KL is measured against {reference.description}{path}")
    return learner, reference


def _start_model(
    spec: ExperimentSpec,
    setup: PhaseSetup,
    folder: RunFolder,
    ranks: Ranks,
    progress: ProgressFile,
    recorder: Recorder | None,
) -> Policy:
    progress.show_activity("model")
    dtype = getattr(torch, spec.runner.dtype)
    trains = spec.model.warm_start is not None  # in float32; its result is rounded
    policy = build_policy(
        *(spec.model, spec.seed, folder.tokenizer), torch.float32 if trains else dtype
    )
    if spec.probe is not None:
        require_texts(spec.probe, policy.dialogue)
    if setup.plan.talk is not None and setup.plan.talk.tools:
        policy.dialogue.check_tools(setup.plan.talk.tools)

    _start_warm(spec, setup, policy, ranks, progress, recorder)
    convert_weights(policy.model, dtype)
    return policy


POINTS = 100
"""Points of the curve of a warm start's loss, about."""
LINES = 10
"""Times that a warm start's losses are recorded, about, each with a line of the log."""


def _start_warm(
    spec: ExperimentSpec,
    setup: PhaseSetup,
    policy: Policy,
    ranks: Ranks,
    progress: ProgressFile,
    recorder: Recorder | None,
) -> None:
    """Trains a policy, in float32, on demonstrations, if the experiment has a warm start, or loads
    what an earlier run has trained; every rank calls it. Rank 0 alone trains it, so that the result
    does not depend on the number of ranks, and runs of any number find it in the cache."""
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
            recorder.announce("warm_start_refused", message)
        else:
            print(message, flush=True)

    cache = get_rlx_home() / WARM_STARTS
    cache.mkdir(parents=True, exist_ok=True)
    start = partial(
        warm_start_policy,
        *(policy, spec, setup.demonstrations, cache, report_step),
        *(setup.environment, report_damage, ranks.device),
    )
    started = start() if ranks.is_first else None
    ranks.barrier()
    if not ranks.is_first:
        start()
    if recorder and started:
        _record_start(recorder, started, reused=not trained)


def _record_start(recorder: Recorder, folder: Path, *, reused: bool) -> None:
    if reused:  # an earlier run has trained it
        losses = dict(enumerate(read_warm_start_losses(folder), start=1))
        total = len(losses)
        if points := {n: loss for n, loss in losses.items() if _is_point(n, total, POINTS)}:
            recorder.warm_start(points, total)
        origin = "that are shipped" if is_shipped_warm_start(folder) else "of an earlier run"
        print(f"warm start  {total} steps {origin} are reused", flush=True)
    recorder.phase("before training")
    message = f"begins with warm start {folder.name}"
    sha256 = compute_manifest_digest(folder)
    recorder.event("warm_start", message, path=f"{WARM_STARTS}/{folder.name}", sha256=sha256)


def _is_point(done: int, total: int, points: int) -> bool:
    """Whether a step is the first, the last or one of about `points` steps between them."""
    return done in (1, total) or done % max(1, total // points) == 0


def _train_phase(
    context: RunContext, base: PhaseSetup, number: int, at: ResumePoint, stop: StopRequest
) -> ResumePoint:
    """Trains one phase, or the rest of it; returns the run's position after it.

    Raises:
        RunStopped, RewardError: a stop was requested, or answers to rewards have cost what they
            may; a checkpoint of the last step has been written.
    """
    phase = context.spec.phases[number]
    setup = build_setup(context.spec.resolve_phase_spec(phase))
    begun = at.done if at.phase == number else 0
    context.learner.begin_phase(setup.spec.optimizer, fresh=phase.fresh_optimizer and not begun)
    if context.recorder:
        context.recorder.phase(phase.name)
    step, cursor, learned = at.step, at.cursor, at.learned
    controllers = ControllerState.begin(setup.spec.credit, at.controllers)
    watch = AlarmWatch(setup.spec.rollout, setup.environment)
    restarts = context.sampler.restarts
    for done in range(begun, phase.steps):
        step += 1
        rate = learning_rate(setup.spec.optimizer, done, phase.steps)
        stepped = train_step(context, setup, phase.name, step, cursor, rate, controllers)
        controllers = stepped.controllers
        learned += bool(stepped.figures)
        cursor += stepped.drawn
        metrics = stepped.select_progress_figures(setup.spec)
        note = "  ".join(f"{k.split('/')[-1]} {v:.3f}" for k, v in metrics.items())
        context.progress.show(Progress(f"training: {phase.name}", done + 1, phase.steps, note))
        if context.recorder:
            print(f"step {step}/{context.spec.steps}  {phase.name}  {note}", flush=True)
        watch.observe_step(step, stepped.figures, context.recorder)
        if context.recorder and context.sampler.restarts > restarts:
            message = f"a process of the sampler was started again by step {step}, see the log"
            context.recorder.event("sampler_restarted", message, level="warning")
        restarts = context.sampler.restarts
        _run_due_evaluations(context, base, step)
        at = ResumePoint(step, cursor, learned, number, done + 1, controllers)
        stopping = any(context.ranks.gather(stop.requested))
        spent, *_ = context.ranks.gather(_describe_spent_budget(context, setup))
        every = context.spec.runner.checkpoint.every
        if stopping or spent or (every and (step % every == 0 or step == context.spec.steps)):
            checkpoint_run(context, at)
        if stopping:
            raise RunStopped
        if spent:
            raise RewardError(f"{spent}; a checkpoint of step {step} is written")
    return at


def _describe_spent_budget(context: RunContext, setup: PhaseSetup) -> str | None:
    """Says that the answers to rewards have cost as much as one of them allows; None if not."""
    limits = [getattr(reward.plugin, "max_cost", None) for reward in setup.rewards]
    if not (known := [limit for limit in limits if limit is not None]):
        return None
    cost, limit = sum_costs(context.folder.answers().parent), min(known)
    if cost < limit:
        return None
    return f"the answers to rewards have cost {cost:.6g}, and {limit:g} is their limit"


def _run_due_evaluations(context: RunContext, base: PhaseSetup, step: int) -> None:
    if step == context.spec.steps:
        return
    every = context.spec.evaluation.every
    if every and step % every == 0:
        _evaluate_held_out(context, base, step=step, label="step")
    probes = context.spec.probe.every if context.spec.probe else 0
    if probes and step % probes == 0:
        run_probe(context, base, step=step, label="step")


def _evaluate_held_out(context: RunContext, setup: PhaseSetup, *, step: int, label: str) -> None:
    """Evaluates the sampler's current weights on the held-out sets, also greedily if requested;
    without any reward nothing tells right from wrong."""
    if not setup.rewards:
        return
    spec, tasks = context.spec.evaluation, {"held_out": setup.task, **setup.variants}
    plans = {"": setup.plan.copy_with_sampling(1)}
    if spec.greedy:
        plans[".greedy"] = setup.plan.copy_with_sampling(1, top_k=1)
    total, done = spec.problems * len(tasks) * len(plans), 0
    with context.cpu.measure("evaluate"):
        for name, task in tasks.items():
            for how, plan in plans.items():
                show = partial(_show_answered, context.progress, label, done, total)
                show(0)
                _evaluate_suite(context, setup, task, plan, step, label, name + how, show)
                done += spec.problems
    if context.recorder:
        context.recorder.record_durations(step, context.cpu.take("evaluate"))
    _show_answered(context.progress, label, done, total, 0)


def _show_answered(progress: ProgressFile, label: str, before: int, total: int, more: int) -> None:
    """Shows that `more` problems of a held-out set are answered, after all of earlier sets."""
    doing = "generation" if before + more < total else ""
    progress.show(Progress(f"evaluation ({label})", before + more, total, doing=doing))


def _evaluate_suite(
    context: RunContext,
    setup: PhaseSetup,
    task: Task,
    plan: RolloutPlan,
    step: int,
    label: str,
    suite: str,
    show: Callable[[int], None],
) -> None:
    spec = context.spec.evaluation
    fit, numbers = build_prompt_fit(context.policy, setup), range(spec.problems)
    drawn, seeds = draw_held_out_problems(fit, task, context.spec.seed, numbers, "evaluation")
    sample = sample_and_score(context, setup, plan, drawn.problems, seeds, show)
    if context.recorder is None:
        return
    try:
        metrics, pairs = compute_held_out_metrics(
            setup.plan, sample.trees, sample.table, spec.correct
        )
    except RewardError as error:  # training may still succeed; it reports its own failure
        context.recorder.event("held_out_lost", f"{suite} ({label}): {error}", level="warning")
        return
    if environment := environment_figures(sample.trees):
        metrics["environment"] = {k.removeprefix("environment/"): v for k, v in environment.items()}
    if fit.rule is not None:
        metrics["prompts"] = {"dropped": drawn.dropped}
    context.recorder.evaluation(step, label, metrics, pairs, suite)
    where = "" if suite == "held_out" else f"  {suite}"
    accuracy = metrics["accuracy"]
    if lost := metrics.get("lost"):
        message = f"{lost} of {spec.problems} rollouts of {suite} ({label}) could not be scored"
        context.recorder.event("held_out_lost", message, level="warning")
    at = f"step {step}/{context.spec.steps}"
    print(f"{at}  evaluation {label}{where}  accuracy {accuracy:.3f}", flush=True)
