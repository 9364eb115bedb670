"""Runs an experiment on one rank: build, warm start, evaluate, train, evaluate, export."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from rlx.errors import RewardError
from rlx.evaluation import (
    compute_held_out_metrics,
)
from rlx.home import RunFolder
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
    convert_weights,
)
from rlx.phase_setup import PhaseSetup, build_setup
from rlx.plugin import Task
from rlx.plugin_calls import show_plugin_output
from rlx.record import Recorder
from rlx.reward import RewardPool
from rlx.rollout import RolloutPlan
from rlx.run.checkpoints import ResumePoint, checkpoint_run, is_checkpoint_due, resume_run
from rlx.run.collect import build_prompt_fit, sample_and_score
from rlx.run.context import ControllerState, CpuAccount, RunContext, RunStopped, StopRequest
from rlx.run.first_contact import make_first_contact
from rlx.run.metrics import AlarmWatch, environment_figures
from rlx.run.probes import require_texts, run_probe
from rlx.run.progress import Progress, ProgressFile
from rlx.run.training import train_step
from rlx.run.warm_start import start_warm
from rlx.run.weight_sync import synchronize_sampler
from rlx.sampler import (
    SamplingEngine,
    expect_dialogue_length,
    open_sampler,
    require_engine,
)
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec, PretrainedModelSpec


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
    with (
        RewardPool(workers=runner.reward_workers, memory_mb=runner.reward_memory_mb) as pool,
        ExitStack() as ending,
    ):
        policy = _start_model(spec, base, folder, ranks, progress, recorder)
        progress.show_activity("sampler")
        sampler = ending.enter_context(_open_sampler(spec, policy, ranks))
        phases = [build_setup(spec.resolve_phase_spec(phase)) for phase in spec.phases]
        progress.show_activity("learner")
        critic = _build_critic(spec, policy, phases, ranks)
        learner, reference = _build_learner(spec, policy, phases, ranks, recorder)
        context = RunContext(
            spec,
            folder,
            ranks,
            policy,
            sampler,
            learner,
            critic,
            reference,
            pool,
            recorder,
            progress,
            CpuAccount(partial(_read_cpu_seconds, pool, recorder)),
        )
        _record_forms(context)
        resumed = resume_run(context)
        at = resumed or ResumePoint()
        synchronize_sampler(context)
        if resumed is None and isinstance(spec.model, PretrainedModelSpec):
            with context.cpu.measure("evaluate"):
                make_first_contact(context, phases[0])
        if resumed is None or resumed.forked:
            _run_initial_evaluations(context, base, at.step)
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


def _read_cpu_seconds(pool: RewardPool, recorder: Recorder | None) -> float:
    """CPU seconds of this process without the thread that records, and of its workers."""
    return time.process_time() - (recorder.cpu_seconds if recorder else 0.0) + pool.cpu_seconds


@contextmanager
def _open_sampler(spec: ExperimentSpec, policy: Policy, ranks: Ranks) -> Iterator[SamplingEngine]:
    """Opens the sampler for the experiment's dialogues; it leaves its memory to the learner."""
    settings = spec.sampler.for_length(expect_dialogue_length(spec))
    with open_sampler(policy, settings, spec.runner, ranks.device) as sampler:
        sampler.release()
        yield sampler


def _record_forms(context: RunContext) -> None:
    """Records how learner and sampler compute this model, and why, if it is by a slow form."""
    if context.recorder:
        level = "info" if context.learner.chosen.form.merges else "warning"
        context.recorder.event("forms", f"learner: {context.learner.chosen}", level=level)
        context.recorder.event("forms", f"sampler: {context.sampler.description}")
        print(
            f"learner: {context.learner.chosen}\nsampler: {context.sampler.description}",
            flush=True,
        )


def _build_critic(
    spec: ExperimentSpec, policy: Policy, phases: Sequence[PhaseSetup], ranks: Ranks
) -> Critic | None:
    """Builds the critic; None if no phase needs values."""
    if spec.critic is None or not any("values" in setup.needs for setup in phases):
        return None
    return Critic(policy, spec.runner, spec.critic, ranks, spec.seed)


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
    learner, reference = build_learner_with_reference(learned, spec.runner, spec.optimizer, ranks)
    if recorder:
        recorder.event("reference", f"KL is measured against {reference.description}")
    return learner, reference


def _start_model(
    spec: ExperimentSpec,
    setup: PhaseSetup,
    folder: RunFolder,
    ranks: Ranks,
    progress: ProgressFile,
    recorder: Recorder | None,
) -> Policy:
    """Builds the policy and warm-starts it."""
    progress.show_activity("model")
    dtype = getattr(torch, spec.runner.dtype)
    trains = spec.model.warm_start is not None  # in float32; its result is rounded
    policy = build_policy(
        *(spec.model, spec.seed, folder.tokenizer), torch.float32 if trains else dtype
    )
    if spec.probe is not None:
        require_texts(spec.probe, policy.dialogue)

    start_warm(spec, setup, policy, ranks, progress, recorder)
    convert_weights(policy.model, dtype)
    return policy


def _train_phase(
    context: RunContext, base: PhaseSetup, number: int, at: ResumePoint, stop: StopRequest
) -> ResumePoint:
    """Trains one phase, or the rest of it; returns the run's position after it."""
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
        metrics = stepped.select_progress_figures(context.spec.evaluation.correct)
        note = "  ".join(f"{k.split('/')[-1]} {v:.3f}" for k, v in metrics.items())
        context.progress.show(Progress(f"training: {phase.name}", done + 1, phase.steps, note))
        if context.recorder:
            print(f"step {step}/{context.spec.steps}  {phase.name}  {note}", flush=True)
        watch.observe_step(step, stepped.figures, context.recorder)
        restarts = _record_restarts(context, step, restarts)
        _run_due_evaluations(context, base, step)
        at = ResumePoint(step, cursor, learned, number, done + 1, controllers)
        stopping = any(context.ranks.gather(stop.requested))
        if stopping or is_checkpoint_due(context.spec, step):
            checkpoint_run(context, at)
        if stopping:
            raise RunStopped
    return at


def _record_restarts(context: RunContext, step: int, before: int) -> int:
    """Records that processes of the sampler were started again; returns how often so far."""
    count = context.sampler.restarts
    if context.recorder and count > before:
        times = f"{count - before} times" if count > before + 1 else "once"
        message = f"a process of the sampler was started again {times} by step {step}, see the log"
        context.recorder.event("sampler_restarted", message, level="warning")
    return count


def _run_initial_evaluations(context: RunContext, base: PhaseSetup, step: int) -> None:
    """Runs the evaluation and the probe before training."""
    _evaluate_held_out(context, base, step=step, label="before")
    if context.spec.probe is not None and context.spec.probe.every:
        run_probe(context, base, step=step, label="before")


def _run_due_evaluations(context: RunContext, base: PhaseSetup, step: int) -> None:
    """Runs the evaluation and the probe that are due after a step."""
    if step == context.spec.steps:
        return
    every = context.spec.evaluation.every
    if every and step % every == 0:
        _evaluate_held_out(context, base, step=step, label="step")
    probes = context.spec.probe.every if context.spec.probe else 0
    if probes and step % probes == 0:
        run_probe(context, base, step=step, label="step")


def _evaluate_held_out(context: RunContext, setup: PhaseSetup, *, step: int, label: str) -> None:
    """Evaluates the sampler's current weights on the held-out sets, also greedily if requested."""
    spec, tasks = context.spec.evaluation, {"held_out": setup.task, **setup.variants}
    plans = {"": setup.plan.copy_with_sampling(1)}
    if spec.greedy:
        plans[".greedy"] = setup.plan.copy_with_sampling(1, top_k=1)
    total, done = spec.problems * len(tasks) * len(plans), 0
    with context.cpu.measure("evaluate"):
        for name, task in tasks.items():
            for how, plan in plans.items():
                context.progress.show(Progress(f"evaluation ({label})", done, total))
                _evaluate_suite(context, setup, task, plan, step, label, name + how)
                done += spec.problems
    if context.recorder:
        context.recorder.record_durations(step, context.cpu.take("evaluate"))
    context.progress.show(Progress(f"evaluation ({label})", total, total))


def _evaluate_suite(
    context: RunContext,
    setup: PhaseSetup,
    task: Task,
    plan: RolloutPlan,
    step: int,
    label: str,
    suite: str,
) -> None:
    """Evaluates one held-out set with one way of sampling."""
    spec = context.spec.evaluation
    data = derive_seed(context.spec.seed, "held out")
    with show_plugin_output(type(task).__name__):
        problems = [task.problem("test", i, data) for i in range(spec.problems)]
    fit = build_prompt_fit(context.policy, setup)
    drawn = fit.draw_held_out(problems.__getitem__, range(len(problems)))
    seeds = [derive_seed(context.spec.seed, "evaluation", i) for i in drawn.numbers]
    sample = sample_and_score(context, setup, plan, drawn.problems, seeds)
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
        metrics["prompts"] = {"dropped": drawn.dropped, "truncated": drawn.truncated}
    context.recorder.evaluation(step, label, metrics, pairs, suite)
    where = "" if suite == "held_out" else f"  {suite}"
    accuracy = metrics["accuracy"]
    if lost := metrics.get("lost"):
        context.recorder.event(
            "held_out_lost",
            f"{lost} of {len(problems)} rollouts of {suite} ({label}) could not be scored",
            level="warning",
        )
    print(
        f"step {step}/{context.spec.steps}  evaluation {label}{where}  accuracy {accuracy:.3f}",
        flush=True,
    )
