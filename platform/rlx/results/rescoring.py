"""Recompute rewards, masks and advantages of stored rollouts, possibly under another experiment.

Nothing is sampled, and the run is not modified. The run's own experiment reproduces every stored
figure bit for bit. Another experiment shows what it would have changed for the same rollouts.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlx.assignment import build_scored_rows, compute_answer_scores, find_lost_rows
from rlx.batch import TokenBatch, list_batch_rows
from rlx.discovery import describe_data_changes, describe_plugin_changes
from rlx.errors import ShapeError, SpecError
from rlx.launch import get_registry_url, open_registry
from rlx.phase_setup import PhaseSetup, build_setup
from rlx.plan import check_read_spec, read_spec, validate_document
from rlx.record import StoredStep, TrainedRows, read_step
from rlx.reporting import ShowProgress, ignore_progress
from rlx.results.requests import RescoreRequest, check_sections
from rlx.results.stored_steps import select_rollout_steps
from rlx.reward import RewardEntry, RewardPool, RewardTable, score_rollouts
from rlx.run import ControllerState, build_trained_rows, read_token_streams
from rlx.spec import ExperimentSpec
from rlx.spec.reading import apply_overrides, label_refusal, parse_yaml_document
from rlx.step import assign_credit
from rlx.train_batch import TokenStreams, TrainBatch
from rlx_registry import STREAMS, Registry, RunRecord, read_body

RULES = ("rewards", "mask", "estimator", "credit", "loss", "evaluation")
"""Spec sections that determine rewards and advantages; the others determine what was sampled."""

TOKENS = ("mask", "placed", "token_rewards", "kl", "returns", "advantages", "weights")
"""Token streams that are compared."""
SCORES = ("total_score", "token_level_scores", "seed_returns_score")


@dataclass(frozen=True, eq=False)
class RescoredStep:
    """One step as stored, and as recomputed.

    Attributes:
        step: step number.
        phase: name of the phase.
        stored: the stored step.
        table: new rewards of all its trees.
        rows: recomputed rows: the stored rows that still have all their rewards.
        kept: `[B']` index of each of them among the stored rows.
        setup: the setup that computed them.
    """

    step: int
    phase: str
    stored: StoredStep
    table: RewardTable
    rows: TrainedRows
    kept: Tensor
    setup: PhaseSetup


@dataclass
class FigureChange:
    """Changes of one figure over all steps.

    Attributes:
        what: "reward NAME" (weighted), a token stream, or a row score.
        unit: what `n` counts.
        n: number of values compared.
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
        if before is not None:
            self.n_before += n
            self.before += float(before.double().sum())
        if after is not None:
            self.n_after += n
            self.after += float(after.double().sum())
        if before is None or after is None:
            self.appeared += n * (after is not None)
            self.vanished += n * (before is not None)
        elif n:
            self.largest = max(self.largest, float((after.double() - before.double()).abs().max()))


@dataclass
class RescoringSummary:
    """Result of rescoring a run.

    Attributes:
        run: id of the run.
        steps: the rescored steps.
        changes: changes by figure.
        left: trained rows that rescoring drops because one of their rewards is lost.
    """

    run: str
    steps: list[int] = field(default_factory=list)
    changes: dict[str, FigureChange] = field(default_factory=dict)
    left: int = 0

    @property
    def is_identical(self) -> bool:
        """Whether every figure is bit-identical to the stored one."""
        return not self.left and not any(c.changed for c in self.changes.values())

    def get_figure_change(self, what: str, unit: str) -> FigureChange:
        """Returns the changes of a figure, adding an empty entry if there is none."""
        return self.changes.setdefault(what, FigureChange(what, unit))

    def add(self, found: RescoredStep) -> None:
        """Adds one step."""
        self.steps.append(found.step)
        self.left += len(found.stored.rows.places) - len(found.kept)
        self._rewards(found)
        before, after = found.stored.rows, found.rows
        width = after.own.shape[1]
        own = after.own
        for name in TOKENS:
            old, new = before.tokens[name], after.tokens[name]
            if old is None and new is None:
                continue
            change = self.get_figure_change(name, "tokens")
            one = None if old is None else old[found.kept][:, :width][own].double()
            other = None if new is None else new[own].double()
            if one is None or other is None:
                change.add(
                    None if one is None else one.abs(),
                    None if other is None else other.abs(),
                    own[own],
                )
                continue
            if name == "advantages":
                change.turned += int((one.sign() * other.sign() < 0).sum())
            change.add(one.abs(), other.abs(), one != other)
            if len(one):
                change.largest = max(change.largest, float((other - one).abs().max()))
        for name in SCORES:
            one, other = before.scores[name][found.kept], after.scores[name]
            self.get_figure_change(name, "rows").add(one, other, one != other)

    def _rewards(self, found: RescoredStep) -> None:
        """Adds every named reward of every turn and rollout, trained on or not."""
        tables = found.stored.rewards, found.table
        for scope in ("turns", "rollouts"):
            old, new = (getattr(table, scope) for table in tables)
            for place in sorted(old.keys() | new.keys()):
                one, other = old.get(place, {}), new.get(place, {})
                for name in sorted(one.keys() | other.keys()):
                    entries = one.get(name), other.get(name)
                    known = [e and (e.raw, e.weight, e.status) for e in entries]
                    was, now = (_compute_weighted_reward(e) for e in entries)
                    differ = torch.tensor([known[0] != known[1]])
                    self.get_figure_change(f"reward {name}", "scores").add(was, now, differ)


def _compute_weighted_reward(entry: RewardEntry | None) -> Tensor | None:
    """The weighted reward, `[1]`; None if it is absent, which is not the same as 0."""
    if entry is None or entry.raw is None:
        return None
    return torch.tensor([entry.raw * entry.weight], dtype=torch.float64)


def rescore_steps(
    registry: Registry,
    run: RunRecord,
    spec: ExperimentSpec,
    steps: Sequence[int],
    *,
    own: bool,
    show: Callable[[int], None] = lambda _: None,
) -> Iterator[RescoredStep]:
    """Recomputes stored steps in order.

    Adaptive β and estimator state carry over from step to step, as in training. If the previous
    step was not rescored, they start from the stored values, or from the initial values of `spec`
    if it is not the run's own experiment.

    Args:
        registry: registry that holds the run.
        run: a run with a folder.
        spec: the run's own experiment, or one that differs in rewards, mask, estimator, credit or
            loss.
        steps: steps with recorded rollouts.
        own: whether `spec` is the run's own experiment.
        show: called with the number of each step once it is done.

    Yields:
        One result per step.

    Raises:
        PluginError: a plugin cannot be used here.
        SpecError: the estimator reads what the run did not record.
        RegistryError: the steps were recorded by another version of rlx.
    """
    phases = {phase.name: phase for phase in spec.phases}
    setup: dict[str, PhaseSetup] = {}
    controllers: ControllerState | None = None
    last = 0
    with RewardPool(spec.runner.reward_workers, spec.runner.reward_memory_mb) as pool:
        for step in steps:
            body = registry.results.rollout_body(run.id, step)
            statistics = body.statistics
            stored = read_step(read_body(Path(str(run.directory)) / body.path, body.sha256))
            name = statistics["phase"]
            if name not in setup:
                setup[name] = build_setup(spec.resolve_phase_spec(phases[name]))
            here = setup[name]
            if step != last + 1:
                controllers = None
            controllers = _build_controller_state(here, controllers, statistics, own=own)
            found, train = _recompute_step(
                step, name, stored, here, controllers, statistics["max_tokens"], pool
            )
            controllers, last = controllers.after(train, here.spec, with_critic=False), step
            show(step)
            yield found


def _build_controller_state(
    setup: PhaseSetup, before: ControllerState | None, statistics: Mapping[str, Any], *, own: bool
) -> ControllerState:
    credit, estimator = setup.spec.credit, setup.spec.estimator.plugin
    if before is not None:
        return ControllerState.begin(credit, before)
    if not own:
        return ControllerState.begin(credit, None)
    states = {estimator: statistics["state_before"]}
    return ControllerState.resume(credit, statistics["beta"], states, 0)


def _recompute_step(
    step: int,
    phase: str,
    stored: StoredStep,
    setup: PhaseSetup,
    controllers: ControllerState,
    max_tokens: Mapping[str, int],
    pool: RewardPool,
) -> tuple[RescoredStep, TrainBatch]:
    trees = stored.trees
    table = _score_stored_trees(stored, setup, pool)
    rows = stored.rows
    number = {(tree, segment): i for i, (tree, segment, *_) in enumerate(rows.places)}
    every = {(row.tree, row.segment) for row in list_batch_rows(trees)}
    scored = build_scored_rows(
        setup, trees, table, without=(every - number.keys()) | find_lost_rows(trees, table)
    )
    if scored is None:
        raise ShapeError(f"step {step}: no row has all of its rewards")
    batch = scored.batch
    kept = torch.tensor([number[row.tree, row.segment] for row in batch.rows], dtype=torch.int64)
    streams = read_token_streams(
        rows,
        batch,
        kept,
        recomputed=_rescore_greedy(stored, table, batch),
        beta=controllers.kl.beta,
        state=controllers.states.get(setup.spec.estimator.plugin, {}),
    )
    _check_required_streams(setup, streams, step)
    rules = replace(setup.rules, max_tokens={**max_tokens, **setup.max_tokens})
    train = assign_credit(scored, streams, rules)
    return RescoredStep(step, phase, stored, table, build_trained_rows(train), kept, setup), train


def _score_stored_trees(stored: StoredStep, setup: PhaseSetup, pool: RewardPool) -> RewardTable:
    """Scores all trees; greedy baseline trees are scored apart from the others, as in training."""
    numbers = [
        [t for t, role in enumerate(stored.roles) if (role == "greedy") == greedy]
        for greedy in (False, True)
    ]
    tables = [
        score_rollouts([stored.trees[t] for t in part], setup.rewards, pool) for part in numbers
    ]
    return RewardTable.merge_tables(tables, numbers)


def _rescore_greedy(
    stored: StoredStep, table: RewardTable, batch: TokenBatch
) -> Mapping[str, Tensor]:
    """`greedy_scores`, `[B]` score of the greedy answer to each row's prompt, if there are any."""
    greedy = [t for t, role in enumerate(stored.roles) if role == "greedy"]
    if not greedy:
        return {}
    trees = [greedy[t] for t in batch.tree_ids.tolist()]
    return {"greedy_scores": compute_answer_scores(stored.trees, table, trees)}


def _check_required_streams(setup: PhaseSetup, streams: TokenStreams, step: int) -> None:
    """Checks that every stream that the estimator reads was recorded.

    Raises:
        SpecError: a stream is missing.
    """
    for stream in STREAMS.values():
        if stream.is_optional and stream.name in setup.needs - streams.optional.keys():
            raise SpecError(
                f"estimator {setup.spec.estimator.plugin!r} or KL reads {stream.name}, which the "
                f"run did not record in step {step}: the step cannot be rescored"
            )


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """A row whose advantages change.

    Attributes:
        gap: largest absolute change of an advantage in the row.
        row: index of the row among the recomputed ones of the step.
        found: the step.
    """

    gap: float
    row: int
    found: RescoredStep

    @property
    def number(self) -> int:
        """Number of the row in the step as it is stored."""
        return int(self.found.kept[self.row])

    def list_tokens(self) -> list[dict[str, Any]]:
        """Returns the stored and the recomputed values of the row's own tokens."""
        found, row, stored, number = self.found, self.row, self.found.stored, self.number
        tree, segment, *_ = stored.rows.places[number]
        ids = stored.trees[tree].token_ids(segment)
        lines = []
        for position in found.rows.own[row].nonzero()[:, 0].tolist():
            line: dict[str, Any] = {"position": position, "token": ids[position]}
            for name in ("mask", "token_rewards", "advantages"):
                old, new = stored.rows.tokens[name], found.rows.tokens[name]
                line[name] = None if old is None else old[number, position].item()
                line[f"new_{name}"] = None if new is None else new[row, position].item()
            lines.append(line)
        return lines


@dataclass(frozen=True, slots=True)
class Rescoring:
    """A rescored run.

    Attributes:
        run: the run.
        summary: what changes, over all steps.
        rows: the rows whose advantages change most, the largest change first.
        notes: what has become of the run's plugins, if its own rules were used.
    """

    run: RunRecord
    summary: RescoringSummary
    rows: tuple[ChangedRow, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns what changes as plain JSON values, as `rlx rescore --json` prints it."""
        summary = self.summary
        return {
            "run": summary.run,
            "steps": summary.steps,
            "same": summary.is_identical,
            "rows_left_out": summary.left,
            "changes": [asdict(change) for change in summary.changes.values()],
            "rows": [
                {"step": one.found.step, "row": one.number, "tokens": one.list_tokens()}
                for one in self.rows
            ],
        }


def rescore(
    request: RescoreRequest | str,
    *,
    registry: str | None = None,
    show: ShowProgress = ignore_progress,
) -> Rescoring:
    """Recomputes rewards, masks and advantages of stored rollouts, without sampling.

    With the run's own experiment, the results equal the stored ones bit for bit.

    Args:
        request: which rollouts, and by which rules; a run stands for all its steps and its own
            rules.
        registry: URL of the registry of runs; None takes that of the command line.
        show: called with the progress, in steps.

    Raises:
        SpecError: there is no such run or step, or an override changes what was sampled.
        InvalidSpec: the rules are invalid.
        PluginError: a plugin is missing.
    """
    if isinstance(request, str):
        request = RescoreRequest(run=request)
    with open_registry(get_registry_url(registry)) as opened:
        run = opened.run(request.run)
        spec, own, notes = _build_rescore_spec(run, request.experiment, request.overrides)
        steps = select_rollout_steps(opened, run, request.steps)
        summary, most, done = RescoringSummary(run.id), list[ChangedRow](), count(1)
        for step in rescore_steps(
            opened, run, spec, steps, own=own, show=lambda _: show(next(done), len(steps))
        ):
            summary.add(step)
            most = _keep_largest(most, step, request.rows)
    return Rescoring(run, summary, tuple(most), tuple(notes))


@label_refusal("rescored")
def _build_rescore_spec(
    run: RunRecord, file: Path | None, overrides: Sequence[str]
) -> tuple[ExperimentSpec, bool, list[str]]:
    """Returns the experiment to rescore with, whether it is the run's own, and, for its own, what
    has become of its plugins since."""
    reason = f"stored rollouts cannot be changed; only {', '.join(RULES)} may be changed"
    check_sections(overrides, RULES, reason)
    tree = _resolve_run_spec(run)
    if file is not None:
        other = read_spec(file).spec.dump_resolved()
        tree |= {name: other[name] for name in RULES}
    document = parse_yaml_document(json.dumps(tree, indent=2), f"the experiment of {run.id}")
    read = validate_document(apply_overrides(document, overrides), Path(document.file))
    plugins = check_read_spec(read)
    own = read.spec.dump_resolved() == _resolve_run_spec(run)
    notes = [
        *describe_plugin_changes(plugins.provenance, run.plugins),
        *describe_data_changes(plugins.list_records(), run.plugins),
    ]
    notes = notes if own else []
    return read.spec, own, list(dict.fromkeys(notes))


def _resolve_run_spec(run: RunRecord) -> dict[str, Any]:
    return ExperimentSpec.from_record(run.spec).dump_resolved()


def _keep_largest(rows: Sequence[ChangedRow], found: RescoredStep, most: int) -> list[ChangedRow]:
    """Returns the rows of the largest changes so far, with those of another step."""
    old, new = found.stored.rows.tokens["advantages"], found.rows.tokens["advantages"]
    kept = list(rows)
    if not most or old is None or new is None or not len(new):
        return kept
    gaps = (new - old[found.kept][:, : new.shape[1]]).abs().amax(dim=1)
    worst = gaps.sort(descending=True)
    for gap, row in zip(worst.values.tolist(), worst.indices.tolist(), strict=True):
        if gap == 0 or (len(kept) == most and gap <= kept[-1].gap):
            break
        kept = sorted([*kept, ChangedRow(gap, row, found)], key=lambda one: -one.gap)[:most]
    return kept
