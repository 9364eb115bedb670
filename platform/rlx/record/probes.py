"""Store and read probes: a Parquet table with one record per continuation, and recorded figures."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rlx.errors import RegistryError
from rlx.plugin import Problem
from rlx.probe import AssembledResponse, ProbeResult, RecordedProbe
from rlx.record.rollouts import ENTRIES, encode_entries, read_entries
from rlx.reward import RewardEntry
from rlx_registry import Registry

SCHEMA = pa.schema(
    [
        ("answered", pa.int32()),
        ("problem_id", pa.string()),
        ("prompt", pa.string()),
        ("system", pa.string()),
        ("problem", pa.string()),
        ("stratum", pa.string()),
        ("scheme", pa.string()),
        ("point", pa.int32()),
        ("share", pa.float64()),
        ("reasoning_tokens", pa.int32()),
        ("seed", pa.int64()),
        # Tokens of the whole response; the first `given` were not sampled for this continuation.
        ("token_ids", pa.list_(pa.int32())),
        ("given", pa.int32()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("wrapped", pa.bool_()),
        ("rewards", ENTRIES),
        ("global_rewards", ENTRIES),
        ("correct", pa.bool_()),
        ("same", pa.bool_()),
        ("whole_text", pa.string()),
        ("whole_answer", pa.string()),
        ("whole_correct", pa.bool_()),
        ("confidences", pa.list_(pa.float64())),
    ]
)


@dataclass(frozen=True)
class StoredPoint:
    """The samples of one cut point of one answer's reasoning, which were scored together.

    Attributes:
        problem: the problem.
        scheme, point: how and where the reasoning was cut.
        responses: the responses as scored.
        rewards: turn rewards of each response, by name.
        global_rewards: global rewards of each response, by name.
    """

    problem: Problem
    scheme: str
    point: int
    responses: tuple[AssembledResponse, ...]
    rewards: tuple[Mapping[str, RewardEntry], ...]
    global_rewards: tuple[Mapping[str, RewardEntry], ...]


def probe_table(probed: ProbeResult) -> pa.Table:
    """Builds a table of all samples of a probe; answers without samples are left out."""
    return pa.Table.from_pylist(
        [_build_sample_record(probed, i) for i in range(len(probed.samples))], SCHEMA
    )


def read_probe(table: pa.Table) -> list[StoredPoint]:
    """Reads the scored points of a probe, in table order.

    Args:
        table: made by `probe_table` and read by `rlx_registry.read_body`.

    Raises:
        RegistryError: the columns differ, because another version of rlx wrote the table.
    """
    if not table.schema.equals(SCHEMA):
        raise RegistryError(
            "this probe was recorded by another version of rlx, with other columns; use that "
            "version to read it"
        )
    together = ("answered", "problem_id", "problem", "scheme", "point")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in table.to_pylist():
        groups.setdefault(tuple(record[name] for name in together), []).append(record)
    return [_build_stored_point(records) for records in groups.values()]


def _build_stored_point(records: list[dict[str, Any]]) -> StoredPoint:
    first = records[0]
    return StoredPoint(
        problem=Problem(
            id=first["problem_id"],
            prompt=first["prompt"],
            fields=json.loads(first["problem"]),
            stratum=first["stratum"],
            system=first["system"],
        ),
        scheme=first["scheme"],
        point=first["point"],
        responses=tuple(
            AssembledResponse(tuple(r["token_ids"]), r["text"], r["finish_reason"]) for r in records
        ),
        rewards=tuple(read_entries(r["rewards"]) for r in records),
        global_rewards=tuple(read_entries(r["global_rewards"]) for r in records),
    )


def recorded_probes(registry: Registry, run_id: str) -> list[RecordedProbe]:
    """Reads all recorded probes of a run, one entry per scheme and step."""
    return [
        RecordedProbe(e.suite.removeprefix("probe/"), e.step, e.metrics)
        for e in registry.results.evaluations(run_id, "probe/")
    ]


def _build_sample_record(probed: ProbeResult, number: int) -> dict[str, Any]:
    sample = probed.samples[number]
    answered = probed.answered[sample.answered]
    return {
        "answered": sample.answered,
        "problem_id": answered.problem.id,
        "prompt": answered.problem.prompt,
        "system": answered.problem.system,
        "problem": json.dumps(dict(answered.problem.fields)),
        "stratum": answered.problem.stratum,
        "scheme": sample.scheme,
        "point": sample.point.number,
        "share": sample.point.share,
        "reasoning_tokens": sample.point.tokens,
        "seed": sample.seed,
        "token_ids": sample.response.token_ids,
        "given": sample.given,
        "text": sample.response.text,
        "finish_reason": sample.response.finish_reason,
        "wrapped": sample.wrapped,
        "rewards": encode_entries(sample.rewards),
        "global_rewards": encode_entries(sample.global_rewards),
        "correct": sample.correct,
        "same": sample.same,
        "whole_text": answered.text,
        "whole_answer": answered.answer,
        "whole_correct": answered.correct,
        "confidences": answered.confidences,
    }
