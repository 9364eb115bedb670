"""Scores a file of responses with any reward, without a run."""

import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from rlx.discovery import build_plugin
from rlx.errors import EnvironmentFault, PluginError, SpecError
from rlx.plugin import RewardPlugin, Sample, Score
from rlx.plugin_calls import show_plugin_output
from rlx.reward.plugin_process import RewardJob
from rlx.reward.pool import RewardPool
from rlx.rollout import find_spans
from rlx.spec import PluginUse, RunnerSpec
from rlx.spec.reading import (
    InvalidSpec,
    apply_overrides,
    build_refusal,
    explain_validation_error,
    locate_diagnostic,
    parse_yaml_document,
)
from rlx.text import escape_unprintable

MAX_SPANS = 64
"""Maximum number of tag names extracted from one response, which may hold a hundred thousand."""

_LINES, _CHARACTERS = 2048, 8 << 20
"""Of a batch; files may have millions of lines."""

_closing_tags = re.compile(r"</([A-Za-z_][A-Za-z0-9_-]*)>").finditer

Name = str | int


@dataclass(frozen=True, slots=True)
class ResponseLine:
    """One line of the input: its number, from 1, its `id` and `group` if it has them, and a sample,
    or the fault for which it cannot be scored."""

    number: int
    id: Name | None = None
    group: Name | None = None
    sample: Sample | None = None
    fault: str | None = None


class _ResponseFields(BaseModel):
    """Fields of a line that rlx reads; names and meanings are those of `Sample`."""

    model_config = ConfigDict(strict=True, frozen=True)

    response: str
    problem: dict[str, Any] | None = None
    """Fields of the task; without it, the whole line is used."""
    id: Name | None = None
    group: Name | None = None
    turn: str = "answer"
    number: int = Field(1, ge=1)
    of: FiniteFloat | None = None
    spans: dict[str, str] | None = None
    """Extracted from the response if absent."""
    n_tokens: int = Field(0, ge=0)
    context: list[str] = Field(default_factory=list)
    observations: list[str] = Field(default_factory=list)
    finish_reason: str = "stop"
    info: dict[str, Any] = Field(default_factory=dict)
    history: list[dict[str, Any]] = Field(default_factory=list)


def read_lines(
    stream: Iterable[bytes], field: str = "response", *, reads_parent: bool = False
) -> Iterator[ResponseLine]:
    """Reads JSON Lines in UTF-8; empty lines are skipped."""
    for number, line in enumerate(stream, 1):
        text = line.removeprefix(BOM_UTF8)
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = str(error).splitlines()[0][:200]
            yield ResponseLine(number, fault=f"not JSON: {why}")
            continue
        if isinstance(record, dict):
            yield _parse_record(number, record, field, reads_parent)
        else:
            yield ResponseLine(number, fault="not a JSON object")


def _parse_record(
    number: int, record: dict[str, Any], field: str, reads_parent: bool
) -> ResponseLine:
    values = {key: value for key, value in record.items() if key != "response"}
    if field in record:
        values["response"] = record[field]
    try:
        fields = _ResponseFields.model_validate(values)
    except ValidationError as error:
        name = record.get("id")
        known = name if isinstance(name, str | int) else None
        return ResponseLine(number, known, fault=_describe_line_fault(error, values, field))
    if reads_parent and fields.of is None:
        fault = "`of` is missing: this reward reads the value of another one"
        return ResponseLine(number, fields.id, fields.group, fault=fault)
    given: dict[str, Any] = fields.model_dump(exclude={"problem", "id", "group", "spans"})
    for key, value in given.items():
        given[key] = tuple(value) if isinstance(value, list) else value
    sample = Sample(
        **given,
        id=str(number if fields.id is None else fields.id),
        problem=fields.problem
        if fields.problem is not None
        else {key: value for key, value in record.items() if key != field},
        spans=_find_response_spans(fields) if fields.spans is None else fields.spans,
    )
    return ResponseLine(number, fields.id, fields.group, sample)


def _find_response_spans(fields: _ResponseFields) -> dict[str, str]:
    """The last span of each closed tag, found as rollouts find the tags of their YAML."""
    names: dict[str, None] = {}
    for match in _closing_tags(fields.response):
        names[match[1]] = None
        if len(names) == MAX_SPANS:
            break
    if not names:
        return {}
    ends = (len(fields.response),)
    found = find_spans(fields.response, ends, tuple(names), first_turn=fields.number == 1)
    return {name: span.text for name, span in found.items()}


def _describe_line_fault(error: ValidationError, values: Mapping[str, Any], field: str) -> str:
    if field not in values and "response" not in values:
        return f"`{field}` is missing"
    fault, *_ = explain_validation_error(error, _ResponseFields, values)
    if fault.path[:1] == ("response",):
        return fault.message.replace("response", field, 1)
    return f"{fault.message}; put task fields with such a name under `problem`"


def group_neighboring_lines(lines: Iterable[ResponseLine]) -> Iterator[list[ResponseLine]]:
    """Groups neighboring lines with the same `group`; lines that cannot be scored keep their place,
    and lines that continue a group after another one are not scored."""
    unit: list[ResponseLine] = []
    current: Name | None = None
    ended: set[Name] = set()
    for line in lines:
        if line.fault is None and line.group is None:
            fault = "`group` is missing: this reward judges several lines together"
            line = replace(line, sample=None, fault=fault)
        elif line.fault is None and line.group in ended:
            fault = f"group {line.group!r} has ended: its lines must be neighbours"
            line = replace(line, sample=None, fault=fault)
        if line.fault is None and line.group != current:
            if unit:
                yield unit
            if current is not None:
                ended.add(current)
            unit, current = [], line.group
        unit.append(line)
    if unit:
        yield unit


@dataclass(frozen=True, slots=True)
class ScoredLine:
    """The score of a line, or None, with the reward's explanation, or why there is none."""

    line: ResponseLine
    verdict: Score | None
    reason: str | None

    @property
    def status(self) -> Literal["scored", "absent"]:
        return "absent" if self.verdict is None else "scored"

    def to_plain_dict(self) -> dict[str, Any]:
        named = {} if self.line.id is None else {"id": self.line.id}
        return {
            "line": self.line.number,
            **named,
            "status": self.status,
            "score": self.verdict and self.verdict.value,
            "parts": dict(self.verdict.parts) if self.verdict else {},
            "reason": self.reason,
        }


def score_lines(
    plugin: RewardPlugin,
    lines: Iterable[bytes],
    *,
    field: str = "response",
    workers: int = 1,
    deadline: float = 5.0,
) -> Iterator[list[ScoredLine]]:
    """Yields one result per line, in order and in batches that fit into memory."""
    reads_parent = bool(getattr(plugin, "reads_parent", False))
    read = read_lines(lines, field, reads_parent=reads_parent)
    units = group_neighboring_lines(read) if plugin.scope != "sample" else ([one] for one in read)
    with RewardPool(workers, RunnerSpec().reward_memory_mb) as pool:
        for batch in _cut_batches(units):
            yield list(_score_batch(plugin, batch, pool, deadline))


def _cut_batches(units: Iterable[list[ResponseLine]]) -> Iterator[list[list[ResponseLine]]]:
    """Batches of units (lines that are scored together)."""
    batch: list[list[ResponseLine]] = []
    number = characters = 0
    try:
        for unit in units:
            batch.append(unit)
            number += len(unit)
            characters += sum(len(line.sample.response) for line in unit if line.sample)
            if number >= _LINES or characters >= _CHARACTERS:
                yield batch
                batch, number, characters = [], 0, 0
    except EnvironmentFault:  # first score what was read before the error
        yield batch
        raise
    if batch:
        yield batch


def _score_batch(
    plugin: RewardPlugin, batch: Sequence[Sequence[ResponseLine]], pool: RewardPool, deadline: float
) -> Iterator[ScoredLine]:
    samples = [tuple(line.sample for line in unit if line.sample) for unit in batch]
    outcomes = iter(pool.score([RewardJob(plugin, each, deadline) for each in samples if each]))
    for unit, judged in zip(batch, samples, strict=True):
        outcome = next(outcomes) if judged else None
        verdicts = iter(outcome.verdicts if outcome else ())
        for line in unit:
            if line.sample is None or outcome is None:
                yield ScoredLine(line, None, line.fault)
            elif outcome.fault is not None:
                yield ScoredLine(line, None, outcome.fault)
            else:
                verdict = next(verdicts)
                reason = verdict.reason if verdict else "the reward abstains"
                yield ScoredLine(line, verdict, reason)


def build_reward(name: str, overrides: Sequence[str] = ()) -> RewardPlugin:
    """Builds the reward with its options and runs its own check.

    Raises:
        InvalidSpec: the options do not fit.
        SpecError: `plugin` is set as an option, or the reward's check rejects the options.
        PluginError: the plugin is missing or broken.
        EnvironmentFault: this machine lacks files or packages that the reward reads.
    """
    written = apply_overrides(parse_yaml_document("{}", "--set"), overrides)
    if "plugin" in written.tree:
        raise SpecError("--set plugin=...: the reward is named by --reward")
    try:
        plugin = build_plugin(PluginUse.model_validate({**written.tree, "plugin": name}), "reward")
    except InvalidSpec as error:
        faults = [locate_diagnostic(fault, written) for fault in error.diagnostics]
        raise build_refusal(faults, error.file) from None
    what = f"reward plugin {name!r}: "
    try:
        with show_plugin_output(name):
            plugin.check()
    except (OSError, ImportError) as error:
        raise EnvironmentFault(what + escape_unprintable(str(error))) from error
    except ValueError as error:
        raise SpecError(what + escape_unprintable(str(error))) from error
    except Exception as error:
        fault = f"check() failed: {type(error).__name__}: {error}"
        raise PluginError(what + escape_unprintable(fault)) from error
    return cast(RewardPlugin, plugin)


@contextmanager
def open_response_lines(file: str) -> Iterator[Iterable[bytes]]:
    """Opens a file of JSON Lines; `-` is standard input.

    Raises:
        EnvironmentFault: the file cannot be read, now or later.
    """

    def read(source: BufferedReader) -> Iterator[bytes]:
        try:
            yield from source
        except OSError as error:
            raise build_fault(error) from error

    def build_fault(error: OSError) -> EnvironmentFault:
        name = "standard input" if file == "-" else escape_unprintable(file)
        return EnvironmentFault(f"cannot read {name}: {error.strerror}")

    try:
        source = os.fdopen(os.dup(0), "rb") if file == "-" else Path(file).open("rb")  # noqa: SIM115
    except OSError as error:
        raise build_fault(error) from error
    with source:
        yield read(source)
