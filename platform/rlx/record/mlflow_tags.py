"""Convert a run to MLflow parameters, metric names, tags and a description."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

from rlx.spec.reading import list_leaf_values
from rlx.text import redact_passwords
from rlx_registry import EvaluationRecord, RunRecord

__all__ = [
    "TAG_LIMIT",
    "build_identity_tags",
    "build_run_tags",
    "flat_params",
    "get_experiment_name",
    "legal_key",
    "select_scalar_metrics",
]

TAG_LIMIT = 5000
"""Maximum characters of a tag; MLflow's limit is 8000 bytes."""

_PARAM_LIMIT, _KEY_LIMIT = 6000, 250
_NOT_VARIED = ("name", "seed", "tracking")
"""Sections that have tags of their own, or do not affect results."""
_REMARK = 500
"""Characters reserved for the names of tables that are left out."""


def get_experiment_name(run: RunRecord) -> str:
    """Returns the name of a run's MLflow experiment.

    Before `tracking.experiment` existed, it was the run's own name.
    """
    name: str | None = (run.spec.get("tracking") or {}).get("experiment")
    return name or run.name


def flat_params(spec: Mapping[str, Any]) -> dict[str, str]:
    """Flattens a resolved spec: keys joined by dots, lists by index, values as in JSON.

    Empty lists and mappings are kept as values, and keys that MLflow cannot tell apart are
    numbered, so that none disappears. Values are truncated to MLflow's limit; the tag
    `rlx.cut_params` names those, and the full spec is uploaded as an artifact.

    Example:
        >>> flat_params({"a": {"b": [1, None], "c": []}, "d": "x"})
        {'a.b.0': '1', 'a.b.1': 'null', 'a.c': '[]', 'd': 'x'}
    """
    return {key: value[:_PARAM_LIMIT] for key, value in _iterate_params(spec)}


def _iterate_params(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields every parameter under a name of its own, with its whole value."""
    used: set[str] = set()
    for path, value in _iterate_leaves("", spec):
        key = legal_key(path)
        numbered = (f"{key[: _KEY_LIMIT - 8]}:{number}" for number in count(2))
        name = next(name for name in chain([key], numbered) if name not in used)
        used.add(name)
        yield name, redact_passwords(value)


def legal_key(name: str) -> str:
    """Converts a metric or parameter name to one that MLflow accepts: `pass@8` to `pass_at_8`.

    Example:
        >>> legal_key("eval//pass@8 (%)")
        'eval/pass_at_8 ___'
    """
    plain = re.sub(r"[^A-Za-z0-9_\-./ :]", "_", name.replace("@", "_at_"))
    parts = [part for part in plain.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_KEY_LIMIT] or "_"


def _iterate_leaves(path: str, node: Any) -> Iterator[tuple[str, str]]:
    items = dict(enumerate(node)) if isinstance(node, list | tuple) else node
    if isinstance(items, Mapping) and items:
        for key, value in items.items():
            yield from _iterate_leaves(f"{path}.{key}" if path else str(key), value)
    else:
        yield path, _format_param(node)


def _format_param(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def build_identity_tags(run: RunRecord) -> dict[str, str]:
    """Tags that identify a run, even if several registries share one MLflow server."""
    return {
        "rlx.run_id": run.id,
        "rlx.spec_digest": run.digest,
        "rlx.seed": str(run.seed),
        "rlx.created": repr(run.created),
    }


def build_run_tags(
    run: RunRecord, evaluations: list[EvaluationRecord], groups: Sequence[str] = ()
) -> dict[str, str]:
    """All tags of a run, including its description.

    Args:
        groups: names of the groups that the run belongs to.
    """
    tags = {
        **build_identity_tags(run),
        **_build_varied_tags(run),
        "rlx.recipe": run.name,
        "rlx.status": run.effective_status,
        "rlx.attempt": str(run.attempt),
        "mlflow.source.name": "rlx",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": _format_run_description(run, evaluations),
    }
    tags |= {"rlx.group": ", ".join(groups)[:TAG_LIMIT]} if groups else {}
    tags |= {"rlx.version": str(v)} if (v := run.code.get("version")) else {}
    cut = [key for key, value in _iterate_params(run.settings) if len(value) > _PARAM_LIMIT]
    tags |= {"rlx.cut_params": ", ".join(cut)[:TAG_LIMIT]} if cut else {}
    tags |= {"rlx.reason": run.reason[:TAG_LIMIT]} if run.reason else {}
    tags |= {"mlflow.source.git.commit": str(c)} if (c := run.code.get("commit")) else {}
    return tags


def _build_varied_tags(run: RunRecord) -> dict[str, str]:
    """The values that the command line set, by `--set` or `--grid`, under `rlx.varied.PATH`."""
    origins = run.origins or {}
    return {
        legal_key(f"rlx.varied.{path}"): redact_passwords(_format_param(value))[:TAG_LIMIT]
        for path, value in list_leaf_values(run.settings)
        if origins.get(path) in ("--set", "--set (auto)")
        and path.partition(".")[0] not in _NOT_VARIED
    }


def _format_run_description(run: RunRecord, evaluations: list[EvaluationRecord]) -> str:
    """The run's description in Markdown, with a before/after table per evaluation suite.

    Tables that would exceed the limit are left out whole, and named.
    """
    lines = [
        f"**{run.name}**, seed {run.seed}: rlx run `{run.id}`, spec `{run.digest}`.",
        f"The registry holds the full record: `rlx status {run.id}`, with `--values` for the "
        f"experiment, `rlx samples {run.id}` for rollouts.",
    ]
    left_out: list[str] = []
    for suite in dict.fromkeys(e.suite for e in evaluations):
        named = {e.label: select_scalar_metrics(e.metrics) for e in evaluations if e.suite == suite}
        before, after = named.get("before", {}), named.get("after", {})
        table = ["", f"| {suite} | before | after |", "| --- | ---: | ---: |"]
        table += [
            f"| {name} | {_format_metric_value(before.get(name))} | "
            f"{_format_metric_value(after.get(name))} |"
            for name in dict.fromkeys([*before, *after])
        ]
        if len("\n".join([*lines, *table])) > TAG_LIMIT - _REMARK:
            left_out.append(suite)
        else:
            lines += table
    if left_out:
        lines += ["", f"Left out for lack of space: {', '.join(left_out)}."[:_REMARK]]
    return "\n".join(lines)


def select_scalar_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numeric metrics of an evaluation, without nested ones."""
    numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
    return {name: float(value) for name, value in numbers.items()}


def _format_metric_value(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
