"""Compare two runs: every recorded number of the experiment must be equal."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlx_registry import INDEX_COLUMN, Registry, RunRecord, read_body

OF_MACHINE = ("perf/", "sampler/restarts")
"""Beginnings of the names of metrics that tell of the machine and not of the experiment: timings,
and how often a process of the sampler was lost."""


def find_run_differences(registry: Registry, one: str, other: str) -> Iterator[str]:
    """Yields a sentence for each difference between two runs of one experiment.

    Compares metrics, evaluations with the result of every problem, recorded rollouts with all
    their token streams, and the exported weights.
    """
    first, second = registry.run(one), registry.run(other)
    for run in (first, second):
        if run.status != "finished":
            yield f"{run.id} is {run.status}: {run.reason}"
    yield from _compare_metrics(registry, one, other)
    yield from _compare_evaluations(registry, one, other)
    yield from _compare_rollouts(registry, first, second)
    weights = [(_get_run_directory(run) / "model" / "model.safetensors") for run in (first, second)]
    if all(path.exists() for path in weights):
        if weights[0].read_bytes() != weights[1].read_bytes():
            yield "the exported weights differ"
    else:
        yield "exported weights are missing"


def _get_run_directory(run: RunRecord) -> Path:
    if run.directory is None:
        raise ValueError(f"{run.id} has no folder")
    return Path(run.directory)


def _compare_metrics(registry: Registry, one: str, other: str) -> Iterator[str]:
    found = [
        {
            name: points
            for name, points in registry.results.metrics(run).items()
            if not _is_of_machine(name)
        }
        for run in (one, other)
    ]
    for name in sorted({*found[0], *found[1]}):
        pairs = [dict(series.get(name, ())) for series in found]
        steps = sorted({*pairs[0], *pairs[1]})
        odd = [s for s in steps if pairs[0].get(s) != pairs[1].get(s)]
        if odd:
            values = [series.get(odd[0]) for series in pairs]
            yield f"metric {name} at step {odd[0]}: {values[0]} and {values[1]}"


def _is_of_machine(name: str) -> bool:
    return name.startswith(OF_MACHINE)


def _compare_evaluations(registry: Registry, one: str, other: str) -> Iterator[str]:
    found: list[dict[Any, Any]] = [
        {
            (e.step, e.label, e.suite): (e.metrics, e.payload)
            for e in registry.results.evaluations(run)
        }
        for run in (one, other)
    ]
    for place in sorted({*found[0], *found[1]}):
        step, label, suite = place
        if any(place not in evaluations for evaluations in found):
            yield f"evaluation {suite} ({label}, step {step}) is missing in one of them"
        elif not _agree_on_common_keys(*(evaluations[place] for evaluations in found)):
            yield f"evaluation {suite} ({label}, step {step}) differs"


def _agree_on_common_keys(one: Any, other: Any) -> bool:
    """Whether results are equal, without figures that an earlier version of rlx did not compute."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_agree_on_common_keys(one[key], other[key]) for key in one.keys() & other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(
            _agree_on_common_keys(*pair) for pair in zip(one, other, strict=True)
        )
    return bool(one == other)


def _compare_rollouts(registry: Registry, first: RunRecord, second: RunRecord) -> Iterator[str]:
    runs = (first, second)
    steps = [registry.results.rollout_steps(run.id) for run in runs]
    if steps[0] != steps[1]:
        yield f"rollouts are recorded for {len(steps[0])} and {len(steps[1])} steps"
    for step in sorted({*steps[0]} & {*steps[1]}):
        bodies = [registry.results.rollout_body(run.id, step) for run in runs]
        if bodies[0].statistics != bodies[1].statistics:
            yield f"the statistics of step {step} differ"
        tables = _drop_later_fields(
            [
                read_body(_get_run_directory(run) / body.path, body.sha256)
                for run, body in zip(runs, bodies, strict=True)
            ]
        )
        if not tables[0].equals(tables[1]):
            names = [n for n in tables[0].column_names if not tables[0][n].equals(tables[1][n])]
            yield f"the rollouts of step {step} differ in {', '.join(names)}"
        indices = [registry.results.rollout_index(run.id, step) for run in runs]
        if indices[0] != indices[1]:
            yield f"the index of step {step}'s rollouts differs"


def _drop_later_fields(tables: Sequence[pa.Table]) -> list[pa.Table]:
    """Tables of a step without what an earlier version did not store of segments and rows.

    The column of the index goes too: the registry has it, and it is compared there.
    """
    tables = [
        table.drop_columns([INDEX_COLUMN]) if INDEX_COLUMN in table.column_names else table
        for table in tables
    ]
    for name in ("segments", "rows"):
        kinds = [table.schema.field(name).type for table in tables]
        earlier = min(kinds, key=lambda kind: kind.value_type.num_fields)
        tables = [
            table.set_column(table.column_names.index(name), name, table[name].cast(earlier))
            for table in tables
        ]
    return list(tables)
