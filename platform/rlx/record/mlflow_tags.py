"""Convert a run to MLflow parameters, metric names, tags and a description."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlx.text import redact_passwords
from rlx_registry import EvaluationRecord, RunRecord

__all__ = [
    "TAG_LIMIT",
    "build_identity_tags",
    "build_run_tags",
    "flat_params",
    "legal_key",
    "select_scalar_metrics",
]

TAG_LIMIT = 5000
"""Maximum characters of a tag; MLflow's limit is 8000 bytes."""

_PARAM_LIMIT, _KEY_LIMIT = 6000, 250
_REMARK = 500
"""Characters reserved for the names of tables that are left out."""


def flat_params(spec: Mapping[str, Any]) -> dict[str, str]:
    """Flattens a resolved spec: keys joined by dots, lists by index, values as in JSON.

    Empty lists and mappings are kept as values, so that no key disappears. Values are truncated to
    MLflow's limit; the full spec is uploaded as an artifact.

    Example:
        >>> flat_params({"a": {"b": [1, None], "c": []}, "d": "x"})
        {'a.b.0': '1', 'a.b.1': 'null', 'a.c': '[]', 'd': 'x'}
    """
    return {
        legal_key(key): redact_passwords(value)[:_PARAM_LIMIT]
        for key, value in _iterate_leaves("", spec)
    }


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
        yield path, node if isinstance(node, str) else json.dumps(node)


def build_identity_tags(run: RunRecord) -> dict[str, str]:
    """Tags that identify a run, even if several registries share one MLflow server."""
    return {
        "rlx.run_id": run.id,
        "rlx.spec_digest": run.digest,
        "rlx.seed": str(run.seed),
        "rlx.created": repr(run.created),
    }


def build_run_tags(run: RunRecord, evaluations: list[EvaluationRecord]) -> dict[str, str]:
    """All tags of a run, including its description."""
    tags = {
        **build_identity_tags(run),
        "rlx.status": run.effective_status,
        "rlx.attempt": str(run.attempt),
        "mlflow.source.name": "rlx",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": _format_run_description(run, evaluations),
    }
    tags |= {"rlx.reason": run.reason[:TAG_LIMIT]} if run.reason else {}
    tags |= {"mlflow.source.git.commit": str(c)} if (c := run.code.get("commit")) else {}
    return tags


def _format_run_description(run: RunRecord, evaluations: list[EvaluationRecord]) -> str:
    """The run's description in Markdown, with a before/after table per evaluation suite.

    Tables that would exceed the limit are left out whole, and named.
    """
    lines = [
        f"**{run.name}**, seed {run.seed}: rlx run `{run.id}`, spec `{run.digest}`.",
        f"The registry holds the full record: `rlx status {run.id}`, `rlx show {run.id}` for the "
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
