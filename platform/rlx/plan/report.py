"""The plan of an experiment: everything that is shown of it, as plain values.

`PlanReport.to_json` has the keys, which are stable:

    file, name, digest, seed, ok, exit_code
    notes      what stands in for what is not on this machine
    findings   [{severity, kind, message, path, line, helps, notes}]
    phases     [{names, steps, schedule, estimator, settings, made_up, stopped, shown,
                 rows       [{row, parent, tree, group, kind, level, problem, score, advantage,
                              gradient_weight, lost, finish_reason, turns, context, rewards,
                              tokens}]
                 groups, kinds, counts       as in `rlx.plan.statistics`
                 tokens                      as `rlx.plan.budget.TokenBudget`
                 memory                      as `MemoryEstimate`, with its total, or null}]

A turn has number, kind, finish_reason and advantage. A token has position, token, text, author,
turn, learns, placed (by reward), kl, reward, advantage, weight, old_logprob, reference_logprob,
value and target.
`rows` are all that were made up; `shown` are the numbers of those that tables are printed of. Where
no credit could be given `stopped` says why and `rows` is empty.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rlx.discovery import ExperimentPlugins, resolve_plugins
from rlx.plan.budget import MemoryEstimate, TokenBudget, estimate_memory, token_budget
from rlx.plan.findings import check_trial
from rlx.plan.row_report import RowAccount, RowAccountBuilder, place_named_rewards
from rlx.plan.stand_ins import EncodingDialogue, load_plan_problems, load_speech
from rlx.plan.statistics import (
    GroupStatistics,
    KindStatistics,
    MissingCounts,
    count_trial_losses,
    list_group_statistics,
    list_kinds,
)
from rlx.plan.trial import PlanTrial, run_trial
from rlx.recipe import build_recipe
from rlx.reward import RewardPool
from rlx.rollout import build_piece_splitter
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec, PhaseSpec
from rlx.spec.reading import (
    Diagnostic,
    LoadedSpec,
    format_key_path,
    locate_diagnostic,
    relocate_phase_fault,
)

__all__ = ["PhaseReport", "PlanReport", "build_plan", "convert_to_json", "select_example_rows"]

READINGS = {"scores": "scores", "turns": "named rewards", "token_rewards": "token rewards"}
PROMPTS = 3
MANY_ROWS = 128
"""From so many rows below a prompt on, two prompts do."""


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """One phase, or several that are alike.

    Attributes:
        names: of the phases; `steps` of all of them together.
        schedule: its shape in words.
        estimator: its name.
        settings: what else decides credit, as (what, value).
        made_up: what no model gave.
        stopped: why there are no rows; "" where there are.
        rows: the account of every made-up row.
        shown: numbers of the rows to look at first: an answer that scored, one that failed, and
            confidences of both.
        memory: None where the model's dimensions are not known here.
    """

    names: tuple[str, ...]
    steps: int
    schedule: str
    estimator: str
    settings: tuple[tuple[str, str], ...]
    made_up: tuple[str, ...]
    stopped: str
    rows: tuple[RowAccount, ...]
    shown: tuple[int, ...]
    groups: tuple[GroupStatistics, ...]
    kinds: tuple[KindStatistics, ...]
    counts: MissingCounts | None
    tokens: TokenBudget
    memory: MemoryEstimate | None


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The whole plan."""

    file: str
    name: str
    digest: str
    seed: int
    notes: tuple[str, ...]
    findings: tuple[Diagnostic, ...]
    phases: tuple[PhaseReport, ...]

    @property
    def exit_code(self) -> int:
        """0, or that of the first cause there is: the spec before plugins before the machine."""
        return min((f.exit_code for f in self.findings if f.severity == "error"), default=0)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values under the keys that this module's docstring names."""
        said = convert_to_json(self)
        told = [_convert_diagnostic(f) for f in self.findings]
        code = self.exit_code
        for phase, made in zip(said["phases"], self.phases, strict=True):
            if made.memory is not None:
                phase["memory"]["total"] = made.memory.total
        return {"ok": code == 0, "exit_code": code, **said, "findings": told}


def convert_to_json(value: Any) -> Any:
    """Dataclasses, mappings and sequences as JSON has them; numbers that are not finite as null."""
    if isinstance(value, RowAccount):
        more = {"advantage": value.advantage, "gradient_weight": value.gradient_weight}
        return {**_convert_dataclass_fields(value), **more}
    if is_dataclass(value):
        return _convert_dataclass_fields(value)
    if isinstance(value, Mapping):
        return {str(k): convert_to_json(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [convert_to_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _convert_dataclass_fields(value: Any) -> dict[str, Any]:
    return {f.name: convert_to_json(getattr(value, f.name)) for f in fields(value)}


def _convert_diagnostic(finding: Diagnostic) -> dict[str, Any]:
    said = asdict(finding)
    line = None if finding.position is None else finding.position.line
    keys = ("severity", "kind", "message", "helps", "notes")
    return {
        **{k: convert_to_json(said[k]) for k in keys},
        "path": format_key_path(finding.path),
        "line": line,
    }


# Making it -------------------------------------------------------------------------------------


def build_plan(path: Path, read: LoadedSpec, plugins: ExperimentPlugins) -> PlanReport:
    """Carries made-up rollouts of every phase through the experiment's own code.

    Args:
        path: of the file, as its author named it.
        read: the experiment; it has been checked.
        plugins: its own, with the warnings of that check.

    Raises:
        SpecError, PluginError, EnvironmentFault: nothing at all can be shown.
    """
    spec = read.spec
    speech, note = load_speech(spec)
    notes = [note] if note else []
    found: list[tuple[PhaseSpec, Diagnostic]] = []
    phases = []
    with RewardPool(workers=1, memory_mb=spec.runner.reward_memory_mb) as pool:
        for alike in _group_equal_phases(spec):
            recipe = build_recipe(spec.resolve_phase_spec(alike[0]))
            problems = load_plan_problems(
                recipe.spec, recipe.task, _count_plan_prompts(recipe.spec)
            )
            notes += [problems.note] if problems.note and problems.note not in notes else []
            trial = run_trial(recipe, problems, speech, pool)
            stand_ins = bool(problems.note)
            told = list(check_trial(trial, stand_ins=stand_ins))
            found += [(phase, finding) for phase in alike for finding in told]
            phases.append(_build_phase_report(alike, trial, speech))
            if trial.stuck_plugin:
                break  # it would in the other phases too, a deadline each
    said = [*plugins.warnings, *_locate_findings(read, found)]
    return PlanReport(
        file=str(path),
        name=spec.name,
        digest=spec.digest,
        seed=spec.seed,
        notes=tuple(notes),
        findings=tuple(sorted(said, key=lambda f: f.severity == "warning")),
        phases=tuple(phases),
    )


def _group_equal_phases(spec: ExperimentSpec) -> list[list[PhaseSpec]]:
    """Phases with the same way from rollouts to loss, together."""
    groups: dict[str, list[PhaseSpec]] = {}
    for phase in spec.phases:
        there = spec.resolve_phase_spec(phase)
        decides = there.model_copy(update={"phases": (), "optimizer": spec.optimizer})
        groups.setdefault(decides.model_dump_json(), []).append(phase)
    return list(groups.values())


def _count_plan_prompts(spec: ExperimentSpec) -> int:
    below = 1
    for key in spec.rollout.counts.values():
        below *= getattr(spec.rollout, key)
    wanted = PROMPTS if below < MANY_ROWS else PROMPTS - 1
    return min(wanted, spec.rollout.prompts_per_step)


def _locate_findings(
    read: LoadedSpec, found: Sequence[tuple[PhaseSpec, Diagnostic]]
) -> Iterator[Diagnostic]:
    """Every finding once, at its place in the file: a phase's own at what the phase sets."""
    phases: dict[tuple[Any, str], list[PhaseSpec]] = {}
    for phase, finding in found:
        phases.setdefault((finding.path, finding.message), []).append(phase)
    for finding in {(f.path, f.message): f for _, f in found}.values():
        those = phases[finding.path, finding.message]
        one = those[0]
        if all(phase.set for phase in those) and len(those) < len(read.spec.phases):
            at = ("phases", read.spec.phases.index(one))
            finding = relocate_phase_fault(finding, at, {"name": one.name, "set": one.set})
        yield locate_diagnostic(finding, read.document)


def _build_phase_report(
    alike: Sequence[PhaseSpec], trial: PlanTrial, speech: EncodingDialogue
) -> PhaseReport:
    spec = trial.recipe.spec
    rows = _build_row_accounts(trial, speech)
    tokens = token_budget(trial)
    shape = trial.shape
    return PhaseReport(
        names=tuple(phase.name for phase in alike),
        steps=sum(phase.steps for phase in alike),
        schedule=_describe_schedule(trial),
        estimator=spec.estimator.plugin,
        settings=tuple(_list_credit_settings(spec)),
        made_up=trial.made_up,
        stopped=trial.stopped,
        rows=rows,
        shown=select_example_rows(rows, spec.evaluation.correct),
        groups=list_group_statistics(rows),
        kinds=list_kinds(rows),
        counts=count_trial_losses(trial) if rows else None,
        tokens=tokens,
        memory=None if shape is None else estimate_memory(trial, shape, tokens),
    )


def _build_row_accounts(trial: PlanTrial, speech: EncodingDialogue) -> tuple[RowAccount, ...]:
    train, rewards = trial.train, trial.rewards
    if train is None or rewards is None:
        return ()
    batch = train.batch
    rows = RowAccountBuilder(
        rows=batch.rows,
        groups=batch.group_ids,
        trees=trial.trees,
        table=trial.table,
        tokens={
            "mask": train.mask,
            "weights": train.weights,
            "advantages": train.advantages,
            "old_logprobs": train.streams.old_logprobs,
            "reference_logprobs": train.streams.reference_logprobs,
            "values": train.streams.values,
            "placed": train.placed.token_rewards,
            "token_rewards": train.token_rewards,
            "kl": train.kl,
            "returns": train.returns,
        },
        named=place_named_rewards(
            batch.rows,
            trial.trees,
            trial.table,
            rewards.turn_present,
            batch.turn_ids,
            train.mask,
            trial.recipe.spec.credit,
        ),
        lost=train.placed.lost,
    )
    pieces = build_piece_splitter(speech)
    return tuple(rows.account(number, pieces) for number in range(len(batch.rows)))


def select_example_rows(rows: Sequence[RowAccount], correct: str) -> tuple[int, ...]:
    """An answer that scored and one that failed, and of both the confidences furthest apart.

    Args:
        rows: of a batch.
        correct: the reward that says, by 1, that an answer is correct. Of failures the one that
            scored highest is taken: it is wrong and otherwise in order.
    """
    first = [row for row in rows if row.level == 0]
    right = [row for row in first if _get_raw_reward(row, correct) == 1.0]
    best = max(right or first, key=_get_row_score, default=None)
    if best is None:
        return tuple(row.row for row in rows[:2])
    failed = [r for r in first if r not in right and r.tree == best.tree and r is not best]
    worst = max(failed, key=_get_row_score, default=best)
    picked = []
    for row in dict.fromkeys((best.row, worst.row)):
        below = sorted((r for r in rows if r.parent == row), key=lambda r: r.advantage)
        picked += [row, *dict.fromkeys(r.row for r in (*below[-1:], *below[:1]))]
    return tuple(picked)


def _get_row_score(row: RowAccount) -> float:
    return row.score if row.score is not None else 0.0


def _get_raw_reward(row: RowAccount, name: str) -> float | None:
    return next((given.raw for given in row.rewards if given.name == name), None)


def _describe_schedule(trial: PlanTrial) -> str:
    spec, plan = trial.recipe.spec.rollout, trial.recipe.plan
    counts = " × ".join(f"{v.count} {v.kind}s" for v in plan.levels)
    if plan.talk is not None:
        counts = f"{plan.talk.count} rollouts of up to {plan.talk.max_turns} turns"
        counts += " and a forced answer" if plan.talk.forced_answer else ""
    return f"{spec.schedule}: {spec.prompts_per_step} prompts × {counts}"


def _list_credit_settings(spec: ExperimentSpec) -> list[tuple[str, str]]:
    credit, loss = spec.credit, spec.loss
    estimator = resolve_plugins(spec).estimator
    rollout = spec.rollout
    there: list[tuple[str, Any]] = []
    if isinstance(rollout, EnvironmentRolloutSpec):
        shown = "inline" if rollout.observation == "inline" else "as messages"
        there = [("environment", rollout.environment.plugin), ("observations", shown)]
    said: list[tuple[str, Any]] = [
        *there,
        ("it reads", READINGS[estimator.reading()]),
        ("profile", credit.profile),
        ("mask", spec.mask.plugin),
        ("placement", credit.resolved_placement),
        ("score", credit.score_source),
        ("KL in the reward", f"β {credit.kl_coef:g}" if credit.use_kl_in_reward else "no"),
        ("KL in the loss", f"{loss.kl.kl_penalty} × {loss.kl.coefficient:g}" if loss.kl else "no"),
        ("aggregate", loss.aggregate + (", per turn" if loss.per_turn else "")),
    ]
    return [(what, str(value)) for what, value in said]
