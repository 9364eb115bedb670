"""Runs as trackers are shown them, and the trackers that a run's experiment names."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rlx.errors import EnvironmentFault
from rlx.plugin import TrackedPoint, TrackedRun, Tracker
from rlx.text import escape_unprintable, redact_passwords, redact_values
from rlx_registry import ENDED, EvaluationRecord, MetricRow, Registry, RunRecord

KEY_LIMIT, TAG_LIMIT = 250, 5000
"""Maximum characters of a key and a tag, within MLflow's limits, which are the lowest."""
NOT_VARIED = ("name", "seed", "tracking")
"""Sections that have tags of their own, or do not affect results."""


class TrackerUnavailableError(EnvironmentFault):
    """A tracker cannot be reached, or refused. Nothing is lost; the call can be repeated."""


def list_tracker_settings(run: RunRecord) -> dict[str, Mapping[str, Any]]:
    """Returns the settings of the trackers that a run's experiment names, by kind. Imports
    nothing."""
    tracking = run.spec.get("tracking") or {}
    url = tracking.get("mlflow")
    found = [{"kind": "mlflow", "url": url}] if url else []
    return {one["kind"]: one for one in (*found, *(tracking.get("trackers") or ()))}


def open_trackers(run: RunRecord) -> dict[str, Tracker]:
    """Returns the trackers that a run's experiment names, by kind, without connecting to them."""
    return {kind: open_tracker(settings) for kind, settings in list_tracker_settings(run).items()}


def open_tracker(settings: Mapping[str, Any]) -> Tracker:
    """Returns the tracker with these settings; one that fails whenever it is called, if it cannot
    be used here, so that it holds up no other."""
    from rlx.discovery import import_implementation
    from rlx.spec import TRACKERS

    try:
        valid = TRACKERS.validate_section(settings, as_json=True)
        tracker: Tracker = import_implementation(type(valid).implementation)(valid)
    except Exception as error:  # noqa: BLE001  (third-party code; it is told when it is used)
        return _UnusableTracker(settings["kind"], error)
    return tracker


def list_deleting_trackers(run: RunRecord) -> list[str]:
    """Returns the kinds of the trackers that delete a run; the others leave it where it is."""
    trackers = open_trackers(run).items()
    return [kind for kind, one in trackers if type(one).discard is not Tracker.discard]


class _UnusableTracker(Tracker):
    def __init__(self, kind: str, error: Exception) -> None:
        self.title = kind
        super().__init__(None)
        self._error = error

    def start(self, run: TrackedRun) -> int | None:
        raise self._error

    def has_run(self, run: TrackedRun) -> bool:
        raise self._error


def read_tracked_run(registry: Registry, run_id: str) -> TrackedRun:
    """Reads a run as it is now, with its groups and its evaluations, probes excepted."""
    evaluations = registry.queries.evaluation_figures(run_id)
    plain = [one for one in evaluations if not one.suite.startswith("probe/")]
    return build_tracked_run(registry.run(run_id), registry.list_run_groups(run_id), plain)


def build_tracked_run(
    record: RunRecord,
    groups: Sequence[str] = (),
    evaluations: Sequence[EvaluationRecord] = (),
) -> TrackedRun:
    """Builds what trackers show of a run."""
    identity = build_identity_tags(record)
    return TrackedRun(
        id=record.id,
        name=record.name,
        seed=record.seed,
        project=(record.spec.get("tracking") or {}).get("experiment") or record.name,
        attempt=record.attempt,
        status=record.effective_status,
        created=record.created,
        began=record.started,
        ended=record.ended or (record.heartbeat if record.effective_status in ENDED else None),
        settings=redact_values(record.settings),
        yaml=redact_passwords(record.yaml),
        identity=identity,
        tags=identity | _build_tags(record, groups),
        description=_describe_run(record, evaluations),
        groups=tuple(groups),
        folder=Path(record.directory) if record.directory else None,
        ids={name: getattr(record, name) for name in ("mlflow_run_id", "mlflow_experiment_id")},
    )


def build_point(row: MetricRow) -> TrackedPoint:
    """Builds the point of a metric value, under the name that all trackers show."""
    return TrackedPoint(row.seq, make_legal_key(row.name), row.step, row.value, row.at)


def make_legal_key(name: str) -> str:
    """Converts the name of a metric or parameter to one that every tracker accepts: `pass@8` to
    `pass_at_8`."""
    plain = re.sub(r"[^A-Za-z0-9_\-./ :]", "_", name.replace("@", "_at_"))
    parts = [part for part in plain.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:KEY_LIMIT] or "_"


def build_identity_tags(run: RunRecord) -> dict[str, str]:
    """Tags that identify a run, even if several registries share one server."""
    one = {"rlx.run_id": run.id, "rlx.spec_digest": run.digest}
    return one | {"rlx.seed": str(run.seed), "rlx.created": repr(run.created)}


def _build_tags(record: RunRecord, groups: Sequence[str]) -> dict[str, str]:
    """The other tags of a run, the values that the command line set among them."""
    from rlx.spec.reading import list_leaf_values

    origins = record.origins or {}
    varied = {
        make_legal_key(f"rlx.varied.{path}"): redact_passwords(
            value if isinstance(value, str) else json.dumps(value)
        )
        for path, value in list_leaf_values(record.settings)
        if origins.get(path) in ("--set", "--set (auto)")
        and path.partition(".")[0] not in NOT_VARIED
    }
    tags = {
        **varied,
        "rlx.recipe": record.name,
        "rlx.status": record.effective_status,
        "rlx.attempt": str(record.attempt),
        "rlx.group": ", ".join(groups),
        "rlx.version": str(record.code.get("version") or ""),
        "rlx.commit": str(record.code.get("commit") or ""),
        "rlx.reason": record.reason or "",
    }
    return {name: value[:TAG_LIMIT] for name, value in tags.items() if value}


def _describe_run(run: RunRecord, evaluations: Sequence[EvaluationRecord]) -> str:
    """The run's description in Markdown, with a before/after table of each suite that fits."""
    lines = [
        f"**{run.name}**, seed {run.seed}: rlx run `{run.id}`, spec `{run.digest}`.",
        f"The registry holds the full record: `rlx status {run.id}`, `rlx samples {run.id}`.",
    ]
    for suite in dict.fromkeys(e.suite for e in evaluations):
        named = {e.label: e.metrics for e in evaluations if e.suite == suite}
        ends = [named.get("before", {}), named.get("after", {})]
        table = ["", f"| {suite} | before | after |", "| --- | ---: | ---: |"]
        for name in dict.fromkeys(chain(*ends)):
            values = [end.get(name) for end in ends]
            if any(isinstance(value, int | float) for value in values):
                cells = [f"{v:.4g}" if isinstance(v, int | float) else "" for v in values]
                table.append(f"| {name} | {' | '.join(cells)} |")
        lines += table if len("\n".join([*lines, *table])) <= TAG_LIMIT else ()
    return "\n".join(lines)


def describe_error(tracker: Tracker, error: Exception) -> str:
    """The first line of a tracker's error, after the place where it goes, without passwords."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return escape_unprintable(redact_passwords(f"{tracker.label}: {first}"))


def list_tracker_pages(run: RunRecord) -> dict[str, str]:
    """Returns the addresses or commands that show a run, by kind of tracker; MLflow, which has
    pages of several runs too, excepted."""
    others = {k: one for k, one in list_tracker_settings(run).items() if k != "mlflow"}
    if not others:
        return {}
    shown = build_tracked_run(run)
    pages = {kind: open_tracker(one).find_page(shown) for kind, one in others.items()}
    return {kind: page for kind, page in pages.items() if page}
