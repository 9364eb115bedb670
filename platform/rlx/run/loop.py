"""One run on one rank: build, warm start, evaluate, train phase by phase, evaluate, export."""

from collections.abc import Sequence
from contextlib import ExitStack

from rlx.errors import RewardError
from rlx.evaluation.held_out import compute_held_out_metrics, limit_to_one_answer
from rlx.home import RunFolder, get_rlx_home
from rlx.learner import Critic, Learner, Ranks, learning_rate
from rlx.learner.reference import ReferencePolicy, build_learner_with_reference
from rlx.model import Policy, build_policy, warm_start_policy
from rlx.model.lora import adapt_policy
from rlx.plugin import Task
from rlx.recipe import Recipe, build_recipe
from rlx.record.recorder import Recorder
from rlx.reward import RewardPool
from rlx.rollout import RolloutPlan
from rlx.run.alarms import AlarmWatch
from rlx.run.collect import sample_and_score
from rlx.run.controller_state import ControllerState
from rlx.run.environment_metrics import environment_figures
from rlx.run.prefetcher import Prefetcher
from rlx.run.probes import require_texts, run_probe
from rlx.run.progress import Progress, ProgressFile
from rlx.run.resume import ResumePoint, checkpoint_run, is_checkpoint_due, resume_run
from rlx.run.run_context import RunContext
from rlx.run.stop_request import RunStopped, StopRequest
from rlx.run.training import train_step
from rlx.run.weight_sync import synchronize_sampler
from rlx.sampler import open_sampler, require_engine
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec

__all__ = ["run_experiment"]


def run_experiment(
    spec: ExperimentSpec,
    folder: RunFolder,
    ranks: Ranks,
    recorder: Recorder | None,
    stop: StopRequest,
) -> None:
    """Runs an experiment from its start, or from its newest checkpoint, to its end.

    Raises:
        Stopped: `stop` was asked for; a checkpoint of the step just taken has been written.
    """
    require_engine(spec.sampler)
    progress = ProgressFile(folder.progress if ranks.is_first else None)
    base = build_recipe(spec)
    runner = spec.runner
    with (
        RewardPool(workers=runner.reward_workers, memory_mb=runner.reward_memory_mb) as pool,
        ExitStack() as ending,
        Prefetcher(ranks.device) as ahead,  # ends before the sampler that its thread may be using
    ):
        policy = _start_model(spec, base, ranks, progress)
        progress.show_activity("sampler")
        sampler = ending.enter_context(open_sampler(policy, spec.sampler, runner, ranks.device))
        phases = [build_recipe(spec.resolve_phase_spec(phase)) for phase in spec.phases]
        progress.show_activity("learner")
        critic = _build_critic(spec, policy, phases, ranks)
        learner, reference = _build_learner(spec, policy, phases, ranks, recorder)
        machinery = RunContext(
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
            ahead,
        )
        _record_forms(machinery)
        resumed = resume_run(machinery)
        synchronize_sampler(machinery)
        at = resumed or ResumePoint()
        if resumed is None or resumed.forked:
            _run_initial_evaluations(machinery, base, at.step)
        with stop.defer_exit():
            for number in range(at.phase, len(spec.phases)):
                at = _train_phase(machinery, base, number, at, stop)
        if not at.learned:
            raise RewardError(
                "no step learned anything, since no rollout could ever be scored; `rlx logs RUN` "
                "has the first scorer's reason for every step"
            )
        _evaluate_held_out(machinery, base, step=at.step, label="after")
        learner.export(policy, folder.model)
        run_probe(machinery, base, step=at.step, label="after")


def _record_forms(m: RunContext) -> None:
    """Records how this model is computed here: a slow form has a reason that can be read."""
    if m.recorder:
        level = "info" if m.learner.chosen.form.merges else "warning"
        m.recorder.event("forms", f"the learner computes by {m.learner.chosen}", level=level)
        m.recorder.event("forms", f"the sampler computes by {m.sampler.description}")
        print(f"learner: {m.learner.chosen}\nsampler: {m.sampler.description}", flush=True)


def _build_critic(
    spec: ExperimentSpec, policy: Policy, phases: Sequence[Recipe], ranks: Ranks
) -> Critic | None:
    """The critic, where some phase asks for values."""
    if spec.critic is None or not any(parts.wants_values for parts in phases):
        return None
    return Critic(policy, spec.runner, spec.critic, ranks, spec.seed)


def _build_learner(
    spec: ExperimentSpec,
    policy: Policy,
    phases: Sequence[Recipe],
    ranks: Ranks,
    recorder: Recorder | None,
) -> tuple[Learner, ReferencePolicy | None]:
    """The learner, and the reference policy where KL from it is used."""
    learned = adapt_policy(policy, spec.model, spec.seed)
    if not any(parts.wants_reference for parts in phases):
        return Learner(learned, spec.runner, spec.optimizer, ranks), None
    learner, reference = build_learner_with_reference(learned, spec.runner, spec.optimizer, ranks)
    if recorder:
        recorder.event("reference", f"KL is measured against {reference.description}")
    return learner, reference


def _start_model(
    spec: ExperimentSpec, parts: Recipe, ranks: Ranks, progress: ProgressFile
) -> Policy:
    """The model as training finds it; rank 0 makes the warm start and the others load it."""
    progress.show_activity("model")
    policy = build_policy(spec.model, spec.seed)
    if spec.probe is not None:
        require_texts(spec.probe, policy.dialogue)

    def report_warm_start(done: int, total: int, loss: float) -> None:
        progress.show(Progress("warm start", done, total, f"loss {loss:.3f}"))

    cache = get_rlx_home() / "cache" / "warm_start"
    cache.mkdir(parents=True, exist_ok=True)
    if ranks.is_first:
        warm_start_policy(policy, spec, parts.task, cache, report_warm_start, parts.environment)
    ranks.barrier()
    if not ranks.is_first:
        warm_start_policy(policy, spec, parts.task, cache, report_warm_start, parts.environment)
    return policy


def _train_phase(
    m: RunContext, base: Recipe, number: int, at: ResumePoint, stop: StopRequest
) -> ResumePoint:
    """Trains one phase, or what is left of it; returns how far the run is after it."""
    phase = m.spec.phases[number]
    parts = build_recipe(m.spec.resolve_phase_spec(phase))
    begun = at.done if at.phase == number else 0
    m.learner.begin_phase(parts.spec.optimizer, fresh=phase.fresh_optimizer and not begun)
    if m.recorder:
        m.recorder.phase(phase.name)
    step, cursor, learned = at.step, at.cursor, at.learned
    carried = ControllerState.begin(parts.spec.credit, at.carried)
    watch = AlarmWatch(parts.spec.rollout)
    for done in range(begun, phase.steps):
        step += 1
        rate = learning_rate(parts.spec.optimizer, done, phase.steps)
        more = done + 1 < phase.steps
        stepped = train_step(m, parts, phase.name, step, cursor, rate, carried, more=more)
        carried = stepped.carried
        learned += bool(stepped.figures)
        cursor += stepped.drawn
        shown = stepped.select_progress_figures(m.spec.evaluation.correct)
        note = "  ".join(f"{k.split('/')[-1]} {v:.3f}" for k, v in shown.items())
        m.progress.show(Progress(f"training: {phase.name}", done + 1, phase.steps, note))
        if m.recorder:
            print(f"step {step}/{m.spec.steps}  {phase.name}  {note}", flush=True)
        watch.look(stepped.figures, m.recorder)
        _run_due_evaluations(m, base, step)
        at = ResumePoint(step, cursor, learned, number, done + 1, carried)
        stopping = any(m.ranks.gather(stop.asked))
        if stopping or is_checkpoint_due(m.spec, step):
            checkpoint_run(m, at)
        if stopping:
            raise RunStopped
    return at


def _run_initial_evaluations(m: RunContext, base: Recipe, step: int) -> None:
    """What is measured before anything is learned."""
    _evaluate_held_out(m, base, step=step, label="before")
    if m.spec.probe is not None and m.spec.probe.every:
        run_probe(m, base, step=step, label="before")


def _run_due_evaluations(m: RunContext, base: Recipe, step: int) -> None:
    """What is measured between two steps, where it is time to."""
    if step == m.spec.steps:
        return
    every = m.spec.evaluation.every
    if every and step % every == 0:
        m.ahead.finish(m)
        _evaluate_held_out(m, base, step=step, label="step")
    probes = m.spec.probe.every if m.spec.probe else 0
    if probes and step % probes == 0:
        m.ahead.finish(m)
        run_probe(m, base, step=step, label="step")


def _evaluate_held_out(m: RunContext, parts: Recipe, *, step: int, label: str) -> None:
    """Answers the held-out sets with the sampler's current weights, greedily too where asked."""
    spec, tasks = m.spec.evaluation, {"held_out": parts.task, **parts.variants}
    plans = {"": limit_to_one_answer(parts.plan)}
    if spec.greedy:
        plans[".greedy"] = parts.plan.copy_with_sampling(1, top_k=1)
    total, done = spec.problems * len(tasks) * len(plans), 0
    for name, task in tasks.items():
        for how, plan in plans.items():
            m.progress.show(Progress(f"evaluation ({label})", done, total))
            _evaluate_suite(m, parts, task, plan, step, label, name + how)
            done += spec.problems
    m.progress.show(Progress(f"evaluation ({label})", total, total))


def _evaluate_suite(
    m: RunContext, parts: Recipe, task: Task, plan: RolloutPlan, step: int, label: str, suite: str
) -> None:
    """One held-out set, answered in one way."""
    spec = m.spec.evaluation
    data = derive_seed(m.spec.seed, "held out")
    problems = [task.problem("test", i, data) for i in range(spec.problems)]
    seeds = [derive_seed(m.spec.seed, "evaluation", i) for i in range(spec.problems)]
    sample = sample_and_score(m, parts, plan, problems, seeds)
    if m.recorder is None:
        return
    try:
        result = compute_held_out_metrics(sample.trees, sample.table, spec.correct)
    except RewardError as error:  # training may fare better, and says so where it does not
        m.recorder.event("held_out_lost", f"{suite} ({label}): {error}", level="warning")
        return
    metrics = result.metrics()
    if told := environment_figures(sample.trees):
        metrics["environment"] = {k.removeprefix("environment/"): v for k, v in told.items()}
    m.recorder.evaluation(step, label, metrics, result.payload(), suite)
    where = "" if suite == "held_out" else f"  {suite}"
    accuracy = metrics["accuracy"]
    if result.lost:
        m.recorder.event(
            "held_out_lost",
            f"{result.lost} of {spec.problems} rollouts of {suite} ({label}) could not be scored",
            level="warning",
        )
    print(
        f"step {step}/{m.spec.steps}  evaluation {label}{where}  accuracy {accuracy:.3f}",
        flush=True,
    )
