"""The plan report of an experiment, as plain values.

`PlanReport.to_json` returns these keys, which are stable:

    file, name, digest, seed, ok, exit_code
    notes      placeholders for what is not on this machine, and groups smaller than those of a step
    findings   see `rlx.spec.reading.Diagnostic.to_json`
    disk       see `DiskEstimate`; null if the model's dimensions are unknown
    phases     [{names, steps, schedule, estimator, settings, tools, made_up, stopped,
                 shown,
                 rows       [{row, parent, tree, group, kind, level, problem, score, advantage,
                              gradient_weight, lost, finish_reason, turns, context, rewards,
                              tokens}]
                 groups, kinds, counts       see `rlx.plan.report`
                 tokens                      see `TokenBudget`
                 memory                      see `MemoryEstimate`, plus its totals; or null
                 gpus, gpu_room              see `PhaseReport`}]

A turn has number, kind, finish_reason and advantage. A token has position, token, text, author,
turn, learns, placed (by reward), kl, reward, advantage, weight, old_logprob, reference_logprob,
value and target.
`rows` holds every synthetic row; `shown` holds the numbers of the rows printed as tables. If credit
assignment failed, `stopped` states the reason and `rows` is empty.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev, stdev
from typing import Any

from pydantic_core import to_json

from rlx.batch import list_batch_rows
from rlx.discovery import ExperimentPlugins, resolve_plugins
from rlx.phase_setup import build_setup
from rlx.plan.memory import (
    DiskEstimate,
    MemoryEstimate,
    TokenBudget,
    compute_gpu_shares,
    estimate_disk,
    estimate_step_memory,
    get_usable_share,
    token_budget,
)
from rlx.plan.rehearsal_checks import rehearse_experiment
from rlx.plan.row_accounts import RowAccount, TokenStretch, build_row_accounts
from rlx.plan.synthetic_responses import EncodingDialogue
from rlx.plan.synthetic_step import PlanTrial, describe_row_kind
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec, PhaseSpec
from rlx.spec.reading import Diagnostic, LoadedSpec
from rlx.text import pluralize_noun
from rlx_registry import STREAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Rows that are compared with each other.

    Attributes:
        group: group number; `tree` is the prompt's number, `parent` the row that the group
            continues.
        kind: kind of the rows; "rollout" if they have several turns.
        rows: row numbers; `scores` are their scores.
        std: standard deviation of the scores, by the estimator's `ddof`; None for a group of one.
        advantages: minimum and maximum over its learning tokens.
        has_signal: at least one token has a non-zero advantage.
    """

    group: int
    tree: int
    parent: int | None
    kind: str
    rows: tuple[int, ...]
    scores: tuple[float, ...]
    mean: float
    std: float | None
    advantages: tuple[float, float]
    has_signal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KindStatistics:
    """A kind of turn over all rows, or the text that an environment wrote between turns.

    Attributes:
        kind: kind of turn, or "environment".
        rows: rows with such turns; `turns` is the number of turns.
        tokens: tokens in those turns; `learning` of them are in the loss mask.
        share_of_tokens: share of all learning tokens.
        share_of_gradient: share of Σ weight · |advantage|, which bounds the first update.
    """

    kind: str
    rows: int
    turns: int
    tokens: int
    learning: int
    share_of_tokens: float
    share_of_gradient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingCounts:
    """Losses on the way from responses to tokens.

    Attributes:
        rows: trained rows; `dropped` others were left out because they could not be scored.
        turns_without_tokens: rewarded turns without a learning token.
        reward_lost: Σ |reward| that lies on no token, out of `reward_given`.
        rows_without_spans: rows in which no declared span was found.
        rows_without_learning: rows without a learning token.
        unfinished: synthetic rollouts that ended before the environment was done.
    """

    rows: int
    dropped: int
    turns_without_tokens: int
    reward_lost: float
    reward_given: float
    rows_without_spans: int
    rows_without_learning: int
    unfinished: int


def list_group_statistics(
    rows: Sequence[RowAccount], get_ddof: Callable[[str], int]
) -> tuple[GroupStatistics, ...]:
    """Returns the groups in order of their numbers; `get_ddof` is `Estimator.get_ddof`."""
    members: dict[int, list[RowAccount]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    return tuple(
        _build_group_statistics(number, members[number], get_ddof) for number in sorted(members)
    )


def _build_group_statistics(
    number: int, rows: Sequence[RowAccount], get_ddof: Callable[[str], int]
) -> GroupStatistics:
    kind = describe_row_kind(rows)
    deviation = stdev if get_ddof(kind) else pstdev
    scores = tuple(row.score or 0.0 for row in rows)
    learned = [t.advantage for row in rows for t in row.tokens if t.learns] or [0.0]
    return GroupStatistics(
        group=number,
        tree=rows[0].tree,
        parent=rows[0].parent,
        kind=kind,
        rows=tuple(row.row for row in rows),
        scores=scores,
        mean=mean(scores),
        std=deviation(scores) if len(scores) > 1 else None,
        advantages=(min(learned), max(learned)),
        has_signal=any(learned),
    )


def list_kinds(rows: Sequence[RowAccount]) -> tuple[KindStatistics, ...]:
    """Returns the kinds of turns in order of appearance; "environment" comes last."""
    stretches: dict[str, list[tuple[int, TokenStretch]]] = {}
    for row in rows:
        for stretch in row.stretches:
            stretches.setdefault(stretch.kind, []).append((row.row, stretch))
    if "environment" in stretches:
        stretches["environment"] = stretches.pop("environment")
    lines = {k: [line for _, s in found for line in s.tokens] for k, found in stretches.items()}
    learning = {kind: sum(line.learns for line in own) for kind, own in lines.items()}
    gradient = {k: sum(abs(line.weight * line.advantage) for line in o) for k, o in lines.items()}
    tokens, weight = sum(learning.values()), sum(gradient.values())
    return tuple(
        KindStatistics(
            kind=kind,
            rows=len({row for row, _ in found}),
            turns=len(found),
            tokens=len(lines[kind]),
            learning=learning[kind],
            share_of_tokens=learning[kind] / tokens if tokens else 0.0,
            share_of_gradient=gradient[kind] / weight if weight else 0.0,
        )
        for kind, found in stretches.items()
    )


def count_trial_losses(trial: PlanTrial) -> MissingCounts:
    """Counts the losses of a trial whose credit was assigned."""
    train, rewards = trial.train, trial.rewards
    if train is None or rewards is None:
        raise ValueError("the trial has no credit")
    declared = [level.turn.spans for level in trial.setup.plan.levels]
    without = 0
    for row in train.batch.rows:
        segments = [trial.trees[row.tree].segments[turn] for turn in row.turns]
        without += bool(declared[row.level]) and not any(s.spans for s in segments)
    total = rewards.turn_rewards.abs().sum() + rewards.global_rewards.abs().sum()
    return MissingCounts(
        rows=len(train.batch.rows),
        dropped=len(list_batch_rows(trial.trees)) - len(train.batch.rows),
        turns_without_tokens=int(train.placed.missing.sum()),
        reward_lost=float(train.placed.lost.abs().sum()),
        reward_given=float(total),
        rows_without_spans=without,
        rows_without_learning=int((~train.mask.any(dim=1)).sum()),
        unfinished=len(trial.unfinished_turns),
    )


READINGS = {"scores": "scores", "turns": "named rewards", "token_rewards": "token rewards"}


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """One phase, or several phases with the same settings.

    Attributes:
        names: names of the phases; `steps` is their total.
        schedule: the shape of the schedule, in words.
        estimator: name of the estimator.
        settings: other settings that affect credit, as (name, value).
        tools: what the policy is told of each tool as JSON, a turn that calls it, and what it reads
            then; the last two are "" if no synthetic turn calls it.
        made_up: streams with synthetic values.
        stopped: why there are no rows; "" if there are rows.
        rows: the account of every synthetic row.
        shown: numbers of the rows to look at first: a correct answer, a failed one, and
            confidences of both.
        memory: None if the model's dimensions are unknown on this machine.
        has_teacher: whether every token that learns is drawn to another model.
        gpus: for GPUs by their size, such as "80 GB", the share that the memory takes of what torch
            finds there; empty on a CPU. Up to `gpu_room` fits.
    """

    names: tuple[str, ...]
    steps: int
    schedule: str
    estimator: str
    settings: tuple[tuple[str, str], ...]
    tools: tuple[tuple[str, str, str], ...]
    made_up: tuple[str, ...]
    stopped: str
    rows: tuple[RowAccount, ...]
    shown: tuple[int, ...]
    groups: tuple[GroupStatistics, ...]
    kinds: tuple[KindStatistics, ...]
    counts: MissingCounts | None
    tokens: TokenBudget
    memory: MemoryEstimate | None
    has_teacher: bool
    gpus: Mapping[str, float]
    gpu_room: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The plan of all phases.

    Attributes:
        disk: None if the model's dimensions are unknown on this machine.
    """

    file: str
    name: str
    digest: str
    seed: int
    notes: tuple[str, ...]
    findings: tuple[Diagnostic, ...]
    disk: DiskEstimate | None
    phases: tuple[PhaseReport, ...]

    @property
    def exit_code(self) -> int:
        """0, or the exit code of the first cause found: spec, then plugins, then machine."""
        return min((f.exit_code for f in self.findings if f.severity == "error"), default=0)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values under the keys listed in the module docstring."""
        values = convert_to_json(self)
        findings = [finding.to_json() for finding in self.findings]
        code = self.exit_code
        for phase, made in zip(values["phases"], self.phases, strict=True):
            if made.memory is not None:
                phase["memory"] |= {
                    "total": made.memory.total,
                    "stage_totals": made.memory.stage_totals,
                }
        return {"ok": code == 0, "exit_code": code, **values, "findings": findings}


def convert_to_json(value: Any) -> Any:
    """Converts dataclasses to plain JSON values; non-finite numbers become null."""
    return json.loads(to_json(value, inf_nan_mode="null"))


# Building the report -----------------------------------------------------------------------------


def build_plan(path: Path, read: LoadedSpec, plugins: ExperimentPlugins) -> PlanReport:
    """Runs synthetic rollouts of every phase through the experiment's own code.

    Args:
        path: of the file, as its author named it.
        read: the experiment, already validated.
        plugins: its plugins, with the warnings of that validation.

    Raises:
        InvalidSpec: no trial is possible, as in `rehearse_experiment`.
    """
    rehearsal = rehearse_experiment(read, plugins)
    trials = [one.trial for one in rehearsal.trials]
    notes = [rehearsal.speech.note, *(t.note for t in trials), *(t.smaller for t in trials)]
    findings = [*plugins.warnings, *rehearsal.findings, *rehearsal.biases]
    return PlanReport(
        file=str(path),
        name=read.spec.name,
        digest=plugins.compute_digest(read.spec),
        seed=read.spec.seed,
        notes=tuple(dict.fromkeys(filter(None, notes))),
        findings=tuple(sorted(findings, key=lambda f: f.severity == "warning")),
        disk=None if trials[0].shape is None else estimate_disk(read.spec, trials[0].shape),
        phases=tuple(
            _build_phase_report(one.phases, one.trial, rehearsal.speech.dialogue)
            for one in rehearsal.trials
        ),
    )


def _build_phase_report(
    alike: Sequence[PhaseSpec], trial: PlanTrial, speech: EncodingDialogue
) -> PhaseReport:
    spec = trial.setup.spec
    rows = _build_row_accounts(trial, speech)
    tokens = token_budget(trial.setup, trial.trees)
    shape = trial.shape
    memory = None if shape is None else estimate_step_memory(trial.setup, shape, tokens)
    shares = {} if memory is None else compute_gpu_shares(spec.runner, spec.sampler, memory)
    return PhaseReport(
        names=tuple(phase.name for phase in alike),
        steps=sum(phase.steps for phase in alike),
        schedule=_describe_schedule(trial),
        estimator=spec.estimator.plugin,
        settings=tuple(_list_credit_settings(spec)),
        tools=tuple(_list_called_tools(trial)),
        made_up=trial.made_up,
        stopped=trial.stopped,
        rows=rows,
        shown=select_example_rows(rows, spec.evaluation.correct),
        groups=list_group_statistics(rows, resolve_plugins(spec).estimator.get_ddof),
        kinds=list_kinds(rows),
        counts=count_trial_losses(trial) if rows else None,
        tokens=tokens,
        memory=memory,
        has_teacher=spec.learns_from_teacher,
        gpus=shares,
        gpu_room=get_usable_share(spec.sampler),
    )


def _build_row_accounts(trial: PlanTrial, speech: EncodingDialogue) -> tuple[RowAccount, ...]:
    train, rewards = trial.train, trial.rewards
    if train is None or rewards is None:
        return ()
    return build_row_accounts(
        train.batch,
        trial.trees,
        trial.table,
        trial.setup.spec.credit,
        speech,
        tokens={
            stream.name: train.find_stream(stream.name)
            for stream in STREAMS.values()
            if stream.shape == "[B, T]"
        },
        turn_present=rewards.turn_present,
        groups=train.batch.group_ids,
        lost=train.placed.lost,
    )


def select_example_rows(rows: Sequence[RowAccount], correct: str) -> tuple[int, ...]:
    """Picks a correct answer, a failed answer, what each continues, and the extreme confidences of
    both.

    Args:
        rows: rows of a batch.
        correct: name of the reward that is 1 for a correct answer. Of the failed answers the
            highest-scoring one is picked: it is wrong but otherwise well-formed.
    """
    judged = [row for row in rows if any(reward.name == correct for reward in row.rewards)]
    first = judged or [row for row in rows if row.level == 0]
    right = [row for row in first if _get_raw_reward(row, correct) == 1.0]
    best = max(right or first, key=_get_row_score, default=None)
    if best is None:
        return tuple(row.row for row in rows[:2])
    failed = [r for r in first if r not in right and r.tree == best.tree and r is not best]
    worst = max(failed, key=_get_row_score, default=best)
    picked: list[int] = []
    for row in (best, worst):
        below = sorted((r for r in rows if r.parent == row.row), key=lambda r: r.advantage)
        picked += [r.row for r in rows if r.row == row.parent]
        picked += [row.row, *(r.row for r in (*below[-1:], *below[:1]))]
    return tuple(dict.fromkeys(picked))


def _get_row_score(row: RowAccount) -> float:
    return row.score if row.score is not None else 0.0


def _get_raw_reward(row: RowAccount, name: str) -> float | None:
    return next((reward.raw for reward in row.rewards if reward.name == name), None)


def _describe_schedule(trial: PlanTrial) -> str:
    spec, plan = trial.setup.spec.rollout, trial.setup.plan
    counts = " × ".join(f"{v.count} {pluralize_noun(v.kind)}" for v in plan.levels)
    if plan.talk is not None:
        counts = f"{plan.talk.count} rollouts of up to {plan.talk.max_turns} turns"
        counts += " and a forced answer" if plan.talk.forced_answer else ""
        counts += " of each player" if plan.talk.players > 1 else ""
    return f"{spec.schedule}: {spec.prompts_per_step} prompts × {counts}"


def _list_called_tools(trial: PlanTrial) -> Iterator[tuple[str, str, str]]:
    """Yields each tool with the first synthetic turn that calls it, and the answer to it."""
    talk = trial.setup.plan.talk
    for tool in talk.tools if talk is not None else ():
        called = (
            (segment.text, answer.text)
            for tree in trial.trees
            for number, answer in enumerate(tree.segments)
            if answer.author == "environment"
            for segment in (tree.segments[answer.parent],)
            if tool["function"]["name"] in segment.info.get("called", ())
        )
        yield (json.dumps(tool["function"], ensure_ascii=False), *next(called, ("", "")))


def _list_credit_settings(spec: ExperimentSpec) -> list[tuple[str, str]]:
    credit, loss = spec.credit, spec.loss
    estimator = resolve_plugins(spec).estimator
    rollout = spec.rollout
    environment: list[tuple[str, Any]] = []
    if isinstance(rollout, EnvironmentRolloutSpec):
        placement = "inline" if rollout.observation == "inline" else "as messages"
        environment = [("environment", rollout.environment.plugin), ("observations", placement)]
        if (own := rollout.self_play) is not None:
            whose = "both players learn" if own.learn == "both" else "the first player learns"
            environment.append(("self-play", whose))
    teacher = spec.model.reference
    settings: list[tuple[str, Any]] = [
        *environment,
        *([("teacher", teacher.path)] if teacher is not None else []),
        ("estimator reads", READINGS[estimator.reading()]),
        ("profile", credit.profile),
        ("mask", spec.mask.plugin),
        ("placement", credit.resolved_placement.plugin),
        ("score", credit.score_source),
        ("KL in the reward", f"β {credit.kl_coef:g}" if credit.use_kl_in_reward else "no"),
        ("KL in the loss", f"{loss.kl.kl_penalty} × {loss.kl.coefficient:g}" if loss.kl else "no"),
        ("aggregate", loss.aggregate + (", per turn" if loss.per_turn else "")),
    ]
    passes, parts = spec.optimizer.updates_per_rollout, spec.optimizer.mini_batches
    if passes * parts > 1:
        share = f"{parts} parts of {rollout.prompts_per_step / parts:g} prompts"
        settings.append(("optimizer steps", f"{passes * parts}: {passes} × {share}"))
    if (expected := loss.expected) is not None:
        values = len(build_setup(spec).rules.confidences)
        what = f"{expected.score} of {expected.of} over {values} values × {expected.coefficient:g}"
        settings.append((f"expected score of {expected.span}", what))
    return [(what, str(value)) for what, value in settings]
