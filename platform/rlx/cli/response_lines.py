"""Lines of JSON, each a response to be scored: what `rlx score` reads, and its words for faults."""

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
"""Kinds of tags that are looked for in one response; it may hold a hundred thousand."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_closing_tags = re.compile(r"</([A-Za-z_][A-Za-z0-9_-]*)>").finditer

Name = str | int


@dataclass(frozen=True, slots=True)
class ResponseLine:
    """One line of the input.

    Attributes:
        number: from 1.
        id: as given; None without one.
        group: what it is judged together with, for rewards that look at several samples.
        sample: None where the line cannot be scored.
        fault: why it cannot; None where it can.
    """

    number: int
    id: Name | None = None
    group: Name | None = None
    sample: Sample | None = None
    fault: str | None = None

    def mark_unscorable(self, fault: str) -> "ResponseLine":
        """Returns the same line as one that cannot be scored."""
        return replace(self, sample=None, fault=fault)


class _ResponseFields(BaseModel):
    """What rlx itself reads of a line: the names and meanings are those of `Sample`."""

    model_config = ConfigDict(strict=True, frozen=True)

    response: str
    problem: dict[str, Any] | None = None
    """The task's own fields; without it the whole line stands for them."""
    id: Name | None = None
    group: Name | None = None
    turn: str = "answer"
    number: int = Field(1, ge=1)
    of: FiniteFloat | None = None
    spans: dict[str, str] | None = None
    """Found in the response where they are not given."""
    n_tokens: int = Field(0, ge=0)
    context: list[str] = Field(default_factory=list)
    observations: list[str] = Field(default_factory=list)
    finish_reason: str = "stop"
    info: dict[str, Any] = Field(default_factory=dict)
    history: list[dict[str, Any]] = Field(default_factory=list)


def read_lines(
    stream: Iterable[bytes], field: str = "response", *, reads_parent: bool = False
) -> Iterator[ResponseLine]:
    """Reads JSON Lines; empty lines are passed over.

    Args:
        stream: lines of UTF-8, as a file opened for bytes gives them.
        field: the key under which the response stands.
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
    given = {key: value for key, value in record.items() if key != "response"}
    if field in record:
        given["response"] = record[field]
    try:
        said = _ResponseFields.model_validate(given)
    except ValidationError as error:
        name = record.get("id")
        known = name if isinstance(name, str | int) else None
        return ResponseLine(number, known, fault=_describe_line_fault(error, given, field))
    if reads_parent and said.of is None:
        fault = "`of` is missing: this reward reads the value of another one"
        return ResponseLine(number, said.id, said.group, fault=fault)
    own = {key: value for key, value in record.items() if key != field}
    return ResponseLine(number, said.id, said.group, _build_line_sample(said, own, number))


def _build_line_sample(said: _ResponseFields, own: Mapping[str, Any], number: int) -> Sample:
    spans = said.spans
    return Sample(
        id=str(number if said.id is None else said.id),
        problem=own if said.problem is None else said.problem,
        turn=said.turn,
        number=said.number,
        response=said.response,
        spans=_find_response_spans(said.response, said.number) if spans is None else spans,
        n_tokens=said.n_tokens,
        context=tuple(said.context),
        observations=tuple(said.observations),
        finish_reason=said.finish_reason,
        info=said.info,
        history=tuple(said.history),
        of=said.of,
    )


def _find_response_spans(response: str, number: int) -> dict[str, str]:
    """The last span of every tag that closes, as a rollout finds those that its YAML names."""
    if "</" not in response:
        return {}
    names: dict[str, None] = {}
    for match in _closing_tags(response):
        names[match[1]] = None
        if len(names) == MAX_SPANS:
            break
    found = find_spans(response, (len(response),), tuple(names), first_turn=number == 1)
    return {name: span.text for name, span in found.items()}


def _describe_line_fault(error: ValidationError, given: Mapping[str, Any], field: str) -> str:
    """What is wrong with the first key of ours that is no good."""
    from rlx.spec.reading import explain_validation_error

    if field not in given and "response" not in given:
        return f"`{field}` is missing"
    fault, *_ = explain_validation_error(error, _ResponseFields, given)
    if fault.path[:1] == ("response",):
        return fault.message.replace("response", field, 1)
    return f"{fault.message}; fields of the task with such a name go under `problem`"


def _shorten_error_text(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def group_neighboring_lines(lines: Iterable[ResponseLine]) -> Iterator[list[ResponseLine]]:
    """Puts neighbours with the same `group` together; what cannot be scored stays in its place.

    A group that goes on after another one is not scored: its verdicts would be about a part of it.
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
