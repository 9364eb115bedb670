"""Recomputes rewards, masks and advantages of stored rollouts, possibly under other rules.

Under the run's own experiment every stored figure is reproduced bit for bit.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlx.batch import list_batch_rows
from rlx.discovery import describe_plugin_changes, list_plugin_records
from rlx.errors import ShapeError, SpecError
from rlx.launch import locate_run_folder, open_registry
from rlx.phase_setup import PhaseSetup, build_setup
from rlx.plan import check_read_spec, read_spec, validate_document
from rlx.progress import ShowProgress, ignore_progress
from rlx.record import StoredStep, TrainedRows, read_step
from rlx.results.stored_steps import select_rollout_steps
from rlx.results.targets import OpenedRun, check_sections, locate_target
from rlx.reward import Place, RewardPool, RewardTable, score_rollouts
from rlx.run import ControllerState
from rlx.spec import ExperimentSpec
from rlx.spec.reading import apply_overrides, label_refusal, parse_yaml_document
from rlx.step import (
    ScoredRows,
    TrainBatch,
    assign_credit,
    build_scored_rows,
    compute_answer_scores,
    find_lost_rows,
)
from rlx_registry import STREAMS, Registry, RunRecord, read_body

RULES = ("rewards", "mask", "estimator", "credit", "loss", "evaluation")
"""Spec sections that determine rewards and advantages; the others determine what was sampled."""

TOKENS = ("mask", "placed", "token_rewards", "kl", "returns", "advantages", "weights")
"""Token streams that are compared."""
SCORES = ("total_score", "token_level_scores", "masked_return_sum")


@dataclass(frozen=True, eq=False)
class RescoredStep:
    """One step as stored, and as recomputed: new rewards of all its trees, the rows that still have
    all their rewards, and `kept`, `[B']`, their indices among the stored rows."""

    step: int
    stored: StoredStep
    table: RewardTable
    rows: TrainedRows
    kept: Tensor


@dataclass
class FigureChange:
    """Changes of one figure over all steps.

    Attributes:
        what: "reward NAME" (weighted), a token stream, or a row score.
        unit: what `n`, the number of values compared, counts.
        changed: number of values that differ in any bit, or that exist on one side only.
        n_before, n_after: number of values that exist in the stored and the recomputed step.
        appeared, vanished: values that exist only in the recomputed, or only in the stored step.
        before, after: sums of the values; for token streams, of their absolute values.
        largest: largest absolute difference between two existing values.
        turned: tokens whose advantage changed sign.
    """

    what: str
    unit: str
    n: int = 0
    changed: int = 0
    n_before: int = 0
    n_after: int = 0
    appeared: int = 0
    vanished: int = 0
    before: float = 0.0
    after: float = 0.0
    largest: float = 0.0
    turned: int = 0

    @property
    def means(self) -> tuple[float | None, float | None]:
        """Means before and after, each over existing values; None if there are none."""
        return (
            self.before / self.n_before if self.n_before else None,
            self.after / self.n_after if self.n_after else None,
        )

    def add(self, before: Tensor | None, after: Tensor | None, differ: Tensor) -> None:
        """Adds the values of one step, `[n]` each, or None if the step has none."""
        n = len(differ)
        self.n += n
        self.changed += int(differ.sum())
        of_tokens = self.unit == "tokens"
        if before is not None:
            self.n_before += n
            self.before += float((before.abs() if of_tokens else before).double().sum())
        if after is not None:
            self.n_after += n
            self.after += float((after.abs() if of_tokens else after).double().sum())
        if before is None or after is None:
            self.appeared += n * (after is not None)
            self.vanished += n * (before is not None)
        elif n:
            self.largest = max(self.largest, float((after.double() - before.double()).abs().max()))
            if self.what == "advantages":
                self.turned += int((before.sign() * after.sign() < 0).sum())


@dataclass
class Rescoring:
    """A rescored run: what has become of its plugins, if its own rules were used, and how many
    trained rows are `left` out because one of their rewards is lost."""

    run: RunRecord
    notes: tuple[str, ...] = ()
    steps: list[int] = field(default_factory=list)
    changes: dict[str, FigureChange] = field(default_factory=dict)
    left: int = 0

    @property
    def is_identical(self) -> bool:
        return not self.left and not any(c.changed for c in self.changes.values())

    def to_json(self) -> dict[str, Any]:
        """What `rlx rescore --json` prints."""
        return {
            "run": self.run.id,
            "steps": self.steps,
            "same": self.is_identical,
            "rows_left_out": self.left,
            "changes": [asdict(change) for change in self.changes.values()],
        }

    def add_step(self, found: RescoredStep) -> None:
        self.steps.append(found.step)
        self.left += len(found.stored.rows.places) - len(found.kept)
        self.add_rewards(found.stored.rewards, found.table)
        before, own = found.stored.rows, found.rows.own
        for name in TOKENS:
            old, new = before.tokens[name], found.rows.tokens[name]
            if old is None and new is None:
                continue
            one = None if old is None else old[found.kept][:, : own.shape[1]][own].double()
            other = None if new is None else new[own].double()
            differ = own[own] if one is None or other is None else one != other
            self.changes.setdefault(name, FigureChange(name, "tokens")).add(one, other, differ)
        for name in SCORES:
            one, other = before.scores[name][found.kept], found.rows.scores[name]
            self.changes.setdefault(name, FigureChange(name, "rows")).add(one, other, one != other)

    def add_rewards(self, before: RewardTable, after: RewardTable) -> None:
        """Adds every named reward of every turn and rollout, trained on or not."""
        for scope in ("turns", "rollouts"):
            old, new = getattr(before, scope), getattr(after, scope)
            for place in sorted(old.keys() | new.keys()):
                one, other = old.get(place, {}), new.get(place, {})
                for name in sorted(one.keys() | other.keys()):
                    entries = one.get(name), other.get(name)
                    known = [e and (e.raw, e.weight, e.status) for e in entries]
                    # An absent reward is not the same as 0.
                    was, now = (
                        None
                        if e is None or e.raw is None
                        else torch.tensor([e.raw * e.weight], dtype=torch.float64)
                        for e in entries
                    )
                    differ = torch.tensor([known[0] != known[1]])
                    what = f"reward {name}"
                    change = self.changes.setdefault(what, FigureChange(what, "scores"))
                    change.add(was, now, differ)


def _rescore_steps(
    registry: Registry, run: RunRecord, spec: ExperimentSpec, steps: Sequence[int], *, own: bool
) -> Iterator[RescoredStep]:
    """Recomputes stored steps in order. Adaptive β and estimator state carry over from step to
    step; where the previous step was not rescored, they start from the stored values, or under
    other rules anew."""
    controllers: ControllerState | None = None
    phases = {phase.name: phase for phase in spec.phases}
    build_phase = cache(lambda name: build_setup(spec.resolve_phase_spec(phases[name])))
    last = 0
    runner, folder = spec.runner, locate_run_folder(run)
    with RewardPool(runner.reward_workers, runner.reward_memory_mb, folder.answers()) as pool:
        for step in steps:
            body = registry.results.rollout_body(run.id, step)
            statistics, setup = body.statistics, build_phase(body.statistics["phase"])
            stored = read_step(read_body(folder.root / body.path, body.sha256))
            credit, estimator = setup.spec.credit, setup.spec.estimator.plugin
            if step != last + 1:
                controllers = None
            if controllers is None and own:
                states = {estimator: statistics["state_before"]}
                controllers = ControllerState.resume(credit, statistics["beta"], states, 0)
            else:
                controllers = ControllerState.begin(credit, controllers)
            # Greedy baseline trees are scored apart from the others, as in training.
            greedy = [t for t, role in enumerate(stored.roles) if role == "greedy"]
            parts = [[t for t, role in enumerate(stored.roles) if role != "greedy"], greedy]
            tables = [
                score_rollouts([stored.trees[t] for t in part], setup.rewards, pool)
                for part in parts
            ]
            table = RewardTable.merge_tables(tables, parts)
            needs_reward = setup.spec.learns_from_rewards
            lost = find_lost_rows(stored.trees, table, needs_reward=needs_reward)
            scored = flatten_stored_rows(stored, setup, table, without=lost)
            if scored is None:
                raise ShapeError(f"step {step}: no row has all of its rewards")
            recomputed = {}
            if greedy:  # the score of the greedy answer to each row's prompt
                trees = [greedy[t] for t in scored.batch.tree_ids.tolist()]
                recomputed["greedy_scores"] = compute_answer_scores(stored.trees, table, trees)
            inputs = {
                "beta": controllers.kl.beta,
                "state_before": controllers.states.get(estimator, {}),
                "max_tokens": {**statistics["max_tokens"], **setup.max_tokens},
            }
            train, kept = credit_stored_rows(step, stored, scored, setup, inputs, recomputed)
            controllers, last = controllers.after(train, setup.spec, with_critic=False), step
            yield RescoredStep(step, stored, table, TrainedRows.from_batch(train), kept)


def flatten_stored_rows(
    stored: StoredStep,
    setup: PhaseSetup,
    table: RewardTable,
    *,
    without: Collection[Place] = (),
    mask: Tensor | None = None,
) -> ScoredRows | None:
    """Flattens the rows that a stored step trained on again; None if none is left.

    Args:
        without: rows to leave out, each as `(tree, segment)` of its last turn.
        mask: `[B, T]` bool the loss mask; None takes the strategy's.
    """
    trained = {(tree, segment) for tree, segment, *_ in stored.rows.places}
    every = {(row.tree, row.segment) for row in list_batch_rows(stored.trees)}
    without = (every - trained) | set(without)
    return build_scored_rows(setup, stored.trees, table, without=without, mask=mask)


def credit_stored_rows(
    step: int,
    stored: StoredStep,
    scored: ScoredRows,
    setup: PhaseSetup,
    statistics: Mapping[str, Any],
    recomputed: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[TrainBatch, Tensor]:
    """Assigns credit to rows of a stored step again, with the streams that it recorded; returns it,
    and `[B']` the index of each row among the stored ones.

    Args:
        scored: rows of it, from `flatten_stored_rows`.
        statistics: `beta`, of KL in the reward; `state_before`, the estimator's from the previous
            step; `max_tokens`, the token budget of each kind of turn.
        recomputed: streams that take the place of stored ones.

    Raises:
        SpecError: the estimator reads a stream that was not recorded.
    """
    number = {(tree, segment): i for i, (tree, segment, *_) in enumerate(stored.rows.places)}
    rows = scored.batch.rows
    kept = torch.tensor([number[row.tree, row.segment] for row in rows], dtype=torch.int64)
    streams = stored.rows.read_streams(scored.batch, kept, statistics, recomputed)
    for stream in STREAMS.values():
        if stream.is_optional and stream.name in setup.needs - streams.optional.keys():
            raise SpecError(
                f"estimator {setup.spec.estimator.plugin!r} or KL reads {stream.name}, which the "
                f"run did not record in step {step}: the step cannot be rescored"
            )
    rules = replace(setup.rules, max_tokens=statistics["max_tokens"])
    return assign_credit(scored, streams, rules), kept


def rescore(
    run: str | OpenedRun,
    *,
    experiment: Path | None = None,
    overrides: Sequence[str] = (),
    steps: Sequence[int] = (),
    registry: str | None = None,
    show: ShowProgress = ignore_progress,
) -> Rescoring:
    """Recomputes rewards, masks and advantages of stored rollouts, without sampling.

    Args:
        experiment: file of the experiment whose rules are taken; None takes the run's own.
        overrides: `key=value` of the sections that are rules.
        steps: the steps; empty takes all that are stored.

    Raises:
        SpecError: there is no such run or step, or an override changes what was sampled.
        InvalidSpec: the rules are invalid.
        PluginError: a plugin is missing.
    """
    name, url = locate_target(run, registry)
    with open_registry(url) as opened:
        record = opened.run(name)
        spec, own, notes = _build_rescore_spec(record, experiment, overrides)
        wanted = select_rollout_steps(opened, record, steps)
        found = Rescoring(record, tuple(notes))
        for done, one in enumerate(_rescore_steps(opened, record, spec, wanted, own=own), start=1):
            show(done, len(wanted))
            found.add_step(one)
    return found


@label_refusal("rescored")
def _build_rescore_spec(
    run: RunRecord, file: Path | None, overrides: Sequence[str]
) -> tuple[ExperimentSpec, bool, list[str]]:
    """The experiment to rescore with, whether it is the run's own, and notes on its plugins."""
    reason = f"stored rollouts cannot be changed; only {', '.join(RULES)} may be changed"
    check_sections(overrides, RULES, reason)
    recorded = ExperimentSpec.from_record(run.spec).dump_resolved()
    tree = dict(recorded)
    if file is not None:
        other = read_spec(file).spec.dump_resolved()
        tree |= {name: other[name] for name in RULES}
    document = parse_yaml_document(json.dumps(tree, indent=2), f"the experiment of {run.id}")
    read = validate_document(apply_overrides(document, overrides))
    plugins = check_read_spec(read)
    if read.spec.dump_resolved() != recorded:
        return read.spec, False, []
    notes = describe_plugin_changes(list_plugin_records(read.spec, plugins), run.plugins)
    return read.spec, True, list(dict.fromkeys(notes))
