"""Records of worked examples, and the files that hold them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.errors import SpecError

__all__ = ["GoldenRecord", "GoldenRecords", "read_golden_records"]

_CASE_KEYS = ("id", "response", "numbers", "target", "expected")


@dataclass(frozen=True, kw_only=True)
class GoldenRecord:
    """One worked example.

    Attributes:
        function: name of the function, as `--functions` lists it.
        inputs: its arrays, as nested lists.
        options: its settings.
        outputs: expected values by name; null inside a list is not compared.
        id: name of the record.
        title: what it shows.
        source: where the outputs come from.
        notes: anything else.
    """

    function: str
    outputs: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    title: str = ""
    source: str = ""
    notes: str = ""


@dataclass(frozen=True)
class GoldenRecords:
    """The records of a file, with their tolerances."""

    examples: tuple[GoldenRecord, ...]
    rtol: float = 1e-6
    atol: float = 1e-9


def read_golden_records(path: Path) -> GoldenRecords:
    """Reads `{rtol, atol, examples: [...]}`, a list of records, one record, or one per line.

    A line of a file `*.jsonl` may also be a scored Countdown answer, `{id, response, numbers,
    target, expected}`: `expected` is the score by the default rule, and `expected_source` that by
    TinyZero's own rule, where the two differ.

    Raises:
        SpecError: the file cannot be read or has another form.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from error
    if path.suffix == ".jsonl":
        return GoldenRecords(tuple(_parse_lines(path, text)))
    content = _parse_json(text, str(path))
    whole = content if isinstance(content, dict) and "examples" in content else {}
    examples = whole.get("examples", content if isinstance(content, list) else [content])
    tolerances = {key: float(whole[key]) for key in ("rtol", "atol") if key in whole}
    return GoldenRecords(
        tuple(
            _parse_record(example, f"{path}: record {number}")
            for number, example in enumerate(examples, start=1)
        ),
        **tolerances,
    )


def _parse_lines(path: Path, text: str) -> Iterator[GoldenRecord]:
    # Not `splitlines`: a response may hold a line separator of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path} line {number}"
            entry = _parse_json(line, where)
            if isinstance(entry, dict) and "function" in entry:
                yield _parse_record(entry, where)
            else:
                yield from _parse_countdown_case(entry, where)


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SpecError(f"{where}: not JSON: {error}") from error


def _parse_record(entry: Any, where: str) -> GoldenRecord:
    if not isinstance(entry, dict) or not {"function", "outputs"} <= set(entry):
        raise SpecError(
            f"{where} is not an object with 'function' and 'outputs', such as "
            '{"function": "credit.group_advantages", "inputs": {…}, "options": {…}, '
            '"outputs": {…}}'
        )
    known = GoldenRecord.__dataclass_fields__
    if unknown := sorted(entry.keys() - set(known)):
        raise SpecError(f"{where}: {unknown[0]!r} is none of {', '.join(known)}")
    for name in ("inputs", "options", "outputs"):
        if not isinstance(entry.get(name, {}), dict):
            raise SpecError(f"{where}: {name!r} must be an object")
    return GoldenRecord(**{"id": where.rpartition(" ")[2], **entry})


def _parse_countdown_case(case: Any, where: str) -> Iterator[GoldenRecord]:
    """Yields the record of a scored answer by each of the two rules."""
    lacking = [key for key in _CASE_KEYS if not isinstance(case, dict) or key not in case]
    if lacking:
        raise SpecError(f"{where}: a Countdown case also needs {lacking[0]!r}")
    problem = {"numbers": case["numbers"], "target": case["target"]}
    source = case.get("expected_source", case["expected"])
    rules: tuple[tuple[str, dict[str, Any], Any], ...] = (
        ("", {}, case["expected"]),
        (", source", {"allow_decimals": True}, source),
    )
    for rule, options, expected in rules:
        yield GoldenRecord(
            function="rewards.countdown",
            inputs={"response": case["response"], "problem": problem},
            options=options,
            outputs={"value": expected},
            id=f"{case['id']}{rule}",
            title=str(case.get("note", "")),
        )
