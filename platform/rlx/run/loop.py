"""One run on one rank: build, warm start, evaluate, train phase by phase, evaluate, export."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rlx.batch import TokenBatch, flatten
from rlx.errors import RewardError
from rlx.evaluation.held_out import answered_once, measure
from rlx.learner import Learner, Ranks, UpdateStats, learning_rate
from rlx.model import Policy, build_policy, warm_started
from rlx.model.lora import adapted
from rlx.plugin import Problem
from rlx.record.recorder import Recorder
from rlx.record.rollouts import TrainedRows
from rlx.reward import RewardPool, RewardTable, score
from rlx.rollout import RolloutPlan, RolloutTree, grow
from rlx.run.figures import step_figures
from rlx.run.parts import Parts, make_parts
from rlx.run.paths import RunFolder, home
from rlx.run.progress import Progress, ProgressFile
from rlx.sampler import TransformersSampler
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec, PhaseSpec
from rlx.step import RowRewards, TrainBatch, assign_credit

__all__ = ["run_experiment"]


@dataclass(frozen=True, slots=True)
class Machinery:
    """What lives as long as the run does.

    Attributes:
        recorder: on rank 0; None elsewhere.
    """

    spec: ExperimentSpec
    folder: RunFolder
    ranks: Ranks
    policy: Policy
    sampler: TransformersSampler
    learner: Learner
    pool: RewardPool
    recorder: Recorder | None
    progress: ProgressFile


def run_experiment(
    spec: ExperimentSpec, folder: RunFolder, ranks: Ranks, recorder: Recorder | None
) -> None:
    """Runs an experiment from its start to its end."""
    progress = ProgressFile(folder.progress)
    base = make_parts(spec)
    runner = spec.runner
    with RewardPool(workers=runner.reward_workers, memory_mb=runner.reward_memory_mb) as pool:
        policy = _start_model(spec, base, ranks, progress)
        sampler = TransformersSampler(
            _copy(policy, spec), max_rows=spec.sampler.max_rows, device=ranks.device
        )
        learner = Learner(adapted(policy, spec.model, spec.seed), runner, spec.optimizer, ranks)
        machinery = Machinery(
            spec, folder, ranks, policy, sampler, learner, pool, recorder, progress
        )
        sampler.load(learner.weights())
        _evaluate(machinery, base, step=0, label="before")
        step = cursor = learned = 0
        for phase in spec.phases:
            step, cursor, useful = _train_phase(machinery, base, phase, step, cursor)
            learned += useful
        if not learned:
            raise RewardError(
                "no step learned anything, since no rollout could ever be scored; `rlx logs RUN` "
                "has the first scorer's reason for every step"
            )
        _evaluate(machinery, base, step=step, label="after")
        learner.export(policy, folder.model)


def _start_model(
    spec: ExperimentSpec, parts: Parts, ranks: Ranks, progress: ProgressFile
) -> Policy:
    """The model as training finds it; rank 0 makes the warm start and the others load it."""
    policy = build_policy(spec.model, spec.seed)

    def show(done: int, total: int, loss: float) -> None:
        progress.show(Progress("warm start", done, total, f"loss {loss:.3f}"))

    cache = home() / "cache" / "warm_start"
    cache.mkdir(parents=True, exist_ok=True)
    if ranks.is_first:
        warm_started(policy, spec, parts.task, cache, show)
    ranks.barrier()
    if not ranks.is_first:
        warm_started(policy, spec, parts.task, cache, show)
    return policy


def _copy(policy: Policy, spec: ExperimentSpec) -> Policy:
    """The same model once more, for the sampler to own, in the learner's precision."""
    model = copy.deepcopy(policy.model)
    for parameter in model.parameters():  # buffers stay: positions need float32
        parameter.data = parameter.data.to(getattr(torch, spec.runner.dtype))
    return replace(policy, model=model)


def _train_phase(
    m: Machinery, base: Parts, phase: PhaseSpec, step: int, cursor: int
) -> tuple[int, int, int]:
    """Trains one phase; returns step and data cursor after it, and how many steps were scored."""
    learned = 0
    parts = make_parts(m.spec.in_phase(phase))
    m.learner.begin_phase(parts.spec.optimizer, fresh=phase.fresh_optimizer)
    if m.recorder:
        m.recorder.phase(phase.name)
    every = m.spec.evaluation.every
    for done in range(phase.steps):
        step += 1
        rate = learning_rate(parts.spec.optimizer, done, phase.steps)
        figures = _train_step(m, parts, phase.name, step, cursor, rate)
        learned += bool(figures)
        cursor += parts.spec.rollout.prompts_per_step
        note = "  ".join(f"{k.split('/')[-1]} {v:.3f}" for k, v in figures.items())
        m.progress.show(Progress(f"training: {phase.name}", done + 1, phase.steps, note))
        if m.recorder:
            print(f"step {step}/{m.spec.steps}  {phase.name}  {note}", flush=True)
        if every and step % every == 0 and step < m.spec.steps:
            _evaluate(m, base, step=step, label="step")
    return step, cursor, learned


def _train_step(
    m: Machinery, parts: Parts, phase: str, step: int, cursor: int, rate: float
) -> dict[str, float]:
    """One step as `rlx.step` reads.

    Returns:
        The figures to show while it runs; none where no rollout could be scored.
    """
    spec = parts.spec
    began = time.perf_counter()
    count = spec.rollout.prompts_per_step
    data = derive_seed(m.spec.seed, "train")
    problems = [parts.task.problem("train", cursor + i, data) for i in range(count)]
    seeds = [derive_seed(m.spec.seed, "rollout", cursor + i) for i in range(count)]
    trees, table, sampled, scored = _sample_and_score(m, parts, parts.plan, problems, seeds)
    unscored = {place for place in table.turns if table.total(place) is None} | table.dropped
    if len(unscored) == len(table.turns):
        _tell_skipped(m, step, table)
        return {}
    batch = flatten(trees, temperatures=parts.temperatures, without=unscored)
    train = assign_credit(
        batch,
        _row_rewards(batch, trees, table),
        mask=parts.mask,
        estimator=parts.estimator,
        loss=spec.loss,
    )
    old = batch.behaviour_logprobs
    if spec.loss.old_logprobs == "learner":
        old = m.learner.logprobs(train)
    update: UpdateStats | None = None
    for _ in range(spec.optimizer.updates_per_rollout):
        update = m.learner.update(train, old, spec.loss, rate)
    m.sampler.load(m.learner.weights())
    ended = time.perf_counter()
    seconds = {
        "rollout": sampled,
        "reward": scored,
        "train": ended - began - sampled - scored,
        "step": ended - began,
    }
    figures = step_figures(trees, table, train, update, seconds, m.spec.evaluation.correct)
    _record(m, phase, step, figures, trees, table, train, old)
    shown = (f"rewards/{m.spec.evaluation.correct}/mean", "calibration/brier", "perf/step_s")
    return {name: figures[name] for name in shown if name in figures}


def _tell_skipped(m: Machinery, step: int, table: RewardTable) -> None:
    every = (e for entries in table.turns.values() for e in entries.values())
    reasons = [e.reason for e in every if e.status == "absent" and e.reason]
    why = f"; the first scorer said: {reasons[0]}" if reasons else ""
    told = f"step {step} learned nothing: no rollout could be scored{why}"
    if m.recorder:
        m.recorder.event("step_skipped", told, level="warning")
        print(told, flush=True)


def _sample_and_score(
    m: Machinery,
    parts: Parts,
    plan: RolloutPlan,
    problems: Sequence[Problem],
    seeds: Sequence[int],
) -> tuple[list[RolloutTree], RewardTable, float, float]:
    """Every rank samples and scores its share; then all have all trees, in the problems' order.

    Returns:
        Trees, rewards, and the seconds that sampling and scoring took on this rank.
    """
    began = time.perf_counter()
    mine = slice(m.ranks.rank, None, m.ranks.count)
    with m.sampler.session() as session:
        trees = grow(plan, problems[mine], seeds[mine], session, m.policy.dialogue)
    sampled = time.perf_counter()
    table = score(trees, parts.rewards, m.pool)
    scored = time.perf_counter()
    shares = m.ranks.gather((trees, table))
    count = m.ranks.count
    merged = [shares[i % count][0][i // count] for i in range(len(problems))]
    turns = {
        (t * count + rank, s): entries
        for rank, (_, part) in enumerate(shares)
        for (t, s), entries in part.turns.items()
    }
    dropped = frozenset(
        (t * count + rank, s) for rank, (_, part) in enumerate(shares) for t, s in part.dropped
    )
    faults: dict[str, int] = {}
    for _, part in shares:
        for name, number in part.faults.items():
            faults[name] = faults.get(name, 0) + number
    return merged, RewardTable(turns, dropped, faults), sampled - began, scored - sampled


def _row_rewards(batch: TokenBatch, trees: Sequence[RolloutTree], table: RewardTable) -> RowRewards:
    """The table's weighted sums in the batch's row order, turn number k at column k - 1."""
    shape = len(batch.rows), int(batch.turn_ids.max())
    rewards, present = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for b, row in enumerate(batch.rows):
        for segment in row.turns:
            total = table.total((row.tree, segment))
            if total is not None:
                at = trees[row.tree].segments[segment].turn - 1
                rewards[b, at], present[b, at] = total, True
    return RowRewards(
        turn_rewards=rewards, turn_present=present, global_rewards=torch.zeros(len(batch.rows))
    )


def _record(
    m: Machinery,
    phase: str,
    step: int,
    figures: dict[str, float],
    trees: Sequence[RolloutTree],
    table: RewardTable,
    train: TrainBatch,
    old: torch.Tensor,
) -> None:
    if m.recorder is None:
        return
    batch = train.batch
    rows = TrainedRows(
        [(r.tree, r.segment, r.parent, r.kind, r.level) for r in batch.rows],
        batch.group_ids,
        batch.is_own,
        train.mask,
        train.weights,
        train.advantages,
        old,
    )
    statistics = {"phase": phase, "rows": len(batch.rows), "tokens": int(batch.is_token.sum())}
    path = m.folder.rollouts(step)
    m.recorder.step(step, figures, trees, table, rows, statistics, path)


def _evaluate(m: Machinery, parts: Parts, *, step: int, label: str) -> None:
    """Answers the held-out problems with the sampler's current weights."""
    spec = m.spec.evaluation
    m.progress.show(Progress(f"evaluation ({label})", 0, spec.problems))
    data = derive_seed(m.spec.seed, "held out")
    problems = [parts.task.problem("test", i, data) for i in range(spec.problems)]
    seeds = [derive_seed(m.spec.seed, "evaluation", i) for i in range(spec.problems)]
    plan = answered_once(parts.plan)
    trees, table, *_ = _sample_and_score(m, parts, plan, problems, seeds)
    result = measure(trees, table, spec.correct)
    if m.recorder:
        m.recorder.evaluation(step, label, result.metrics(), result.payload())
        accuracy = result.metrics()["accuracy"]
        print(
            f"step {step}/{m.spec.steps}  evaluation {label}  accuracy {accuracy:.3f}", flush=True
        )
    m.progress.show(Progress(f"evaluation ({label})", spec.problems, spec.problems))
