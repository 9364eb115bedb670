"""Recomputes rewards and advantages of a run's stored rollouts, with any rules."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.assess.stored_steps import select_rollout_steps
from rlx.assess.target import check_sections
from rlx.checks import check_read_spec, read_spec, validate_document
from rlx.discovery import describe_plugin_changes
from rlx.launch import get_registry_url, locate_run_folder, open_registry
from rlx.reporting import ShowProgress, ignore_progress
from rlx.spec import ExperimentSpec
from rlx.spec.reading import apply_overrides, label_refusal, parse_yaml_document
from rlx_registry import RunRecord

if TYPE_CHECKING:
    from rlx.audit import RescoredStep, RescoringSummary  # bring torch

__all__ = ["ChangedRow", "RescoreRequest", "Rescoring", "rescore"]

RULES = ("rewards", "mask", "estimator", "credit", "loss", "evaluation")
"""Spec sections that determine rewards and advantages; the others determine what was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoreRequest:
    """Which rollouts to rescore, and by which rules.

    Attributes:
        run: the run, by its id, its number or `latest`.
        experiment: file of the experiment whose rules are taken; None takes the run's own.
        overrides: `key=value` of the sections that are rules.
        steps: the steps; empty takes all that are stored.
        rows: number of rows to keep token by token, those whose advantages change most.
    """

    run: str
    experiment: Path | None = None
    overrides: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    rows: int = 1


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
    found: "RescoredStep"

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
    summary: "RescoringSummary"
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
    from rlx.audit import RescoringSummary, rescore_steps

    if isinstance(request, str):
        request = RescoreRequest(run=request)
    with open_registry(get_registry_url(registry)) as opened:
        run = opened.run(request.run)
        spec, own, notes = _build_rescore_spec(run, request.experiment, request.overrides)
        locate_run_folder(run, "rollouts", "tokenizer", "model")
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
    notes = describe_plugin_changes(plugins.provenance, run.plugins) if own else ()
    return read.spec, own, list(dict.fromkeys(notes))


def _resolve_run_spec(run: RunRecord) -> dict[str, Any]:
    return ExperimentSpec.from_record(run.spec).dump_resolved()


def _keep_largest(rows: Sequence[ChangedRow], found: "RescoredStep", most: int) -> list[ChangedRow]:
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
