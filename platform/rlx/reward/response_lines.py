"""Reads the JSON Lines that `rlx score` scores, and describes lines that cannot be scored."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from rlx.plugin import Sample
from rlx.rollout import find_spans

__all__ = ["ResponseLine", "group_neighboring_lines", "read_lines"]

MAX_SPANS = 64
"""Maximum number of tag names extracted from one response, which may hold a hundred thousand."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_closing_tags = re.compile(r"</([A-Za-z_][A-Za-z0-9_-]*)>").finditer

Name = str | int


@dataclass(frozen=True, slots=True)
class ResponseLine:
    """One line of the input.

    Attributes:
        number: line number, from 1.
        id: id in the line; None without one.
        group: key of the lines that are scored together, for rewards that read several samples.
        sample: None if the line cannot be scored.
        fault: why the line cannot be scored; None if it can.
    """

    number: int
    id: Name | None = None
    group: Name | None = None
    sample: Sample | None = None
    fault: str | None = None

    def mark_unscorable(self, fault: str) -> "ResponseLine":
        """Returns a copy of the line that cannot be scored because of `fault`."""
        return replace(self, sample=None, fault=fault)


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
    """Reads JSON Lines; empty lines are skipped.

    Args:
        stream: lines in UTF-8, such as a file opened in binary mode.
        field: key of the response.
        reads_parent: whether a line needs `of`.
    """
    for number, raw in enumerate(stream, 1):
        text = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield ResponseLine(number, fault=f"not JSON: {_shorten_error_text(error)}")
            continue
        if isinstance(record, dict):
            yield _parse_line_record(number, record, field, reads_parent)
        else:
            yield ResponseLine(number, fault="not a JSON object")


def _parse_line_record(
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
    own = {key: value for key, value in record.items() if key != field}
    return ResponseLine(number, fields.id, fields.group, _build_line_sample(fields, own, number))


def _build_line_sample(fields: _ResponseFields, own: Mapping[str, Any], number: int) -> Sample:
    spans = fields.spans
    return Sample(
        id=str(number if fields.id is None else fields.id),
        problem=own if fields.problem is None else fields.problem,
        turn=fields.turn,
        number=fields.number,
        response=fields.response,
        spans=_find_response_spans(fields.response, fields.number) if spans is None else spans,
        n_tokens=fields.n_tokens,
        context=tuple(fields.context),
        observations=tuple(fields.observations),
        finish_reason=fields.finish_reason,
        info=fields.info,
        history=tuple(fields.history),
        of=fields.of,
    )


def _find_response_spans(response: str, number: int) -> dict[str, str]:
    """Returns the last span of each closed tag, found as rollouts find the tags of their YAML."""
    if "</" not in response:
        return {}
    names: dict[str, None] = {}
    for match in _closing_tags(response):
        names[match[1]] = None
        if len(names) == MAX_SPANS:
            break
    found = find_spans(response, (len(response),), tuple(names), first_turn=number == 1)
    return {name: span.text for name, span in found.items()}


def _describe_line_fault(error: ValidationError, values: Mapping[str, Any], field: str) -> str:
    """Describes the first field of a line that is invalid."""
    from rlx.spec.reading import explain_validation_error

    if field not in values and "response" not in values:
        return f"`{field}` is missing"
    fault, *_ = explain_validation_error(error, _ResponseFields, values)
    if fault.path[:1] == ("response",):
        return fault.message.replace("response", field, 1)
    return f"{fault.message}; put task fields with such a name under `problem`"


def _shorten_error_text(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def group_neighboring_lines(lines: Iterable[ResponseLine]) -> Iterator[list[ResponseLine]]:
    """Groups neighboring lines with the same `group`; lines that cannot be scored keep their place.

    Lines that continue a group after another one are not scored: they are only part of the group.
    """
    unit: list[ResponseLine] = []
    current: Name | None = None
    ended: set[Name] = set()
    for line in lines:
        if line.fault is None and line.group is None:
            line = line.mark_unscorable(
                "`group` is missing: this reward judges several lines together"
            )
        elif line.fault is None and line.group in ended:
            line = line.mark_unscorable(
                f"group {line.group!r} has ended: its lines must be neighbours"
            )
        if line.fault is None and line.group != current:
            if unit:
                yield unit
            if current is not None:
                ended.add(current)
            unit, current = [], line.group
        unit.append(line)
    if unit:
        yield unit
