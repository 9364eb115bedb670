"""Calls the function of a record and compares its outputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rlx.errors import RlxError
from rlx.testing.golden.compare import agrees
from rlx.testing.golden.functions import find_golden_function
from rlx.testing.golden.record import GoldenRecord

__all__ = ["GoldenFinding", "Status", "check_golden_record"]

Status = Literal["ok", "differs", "unknown"]

_REFUSED = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError),
    RlxError,
)
"""Exceptions that a function raises on inputs of an unexpected form."""


@dataclass(frozen=True)
class GoldenFinding:
    """Result for one output.

    Attributes:
        record: id of the record.
        output: name of the output.
        status: "ok"; "differs"; "unknown" if rlx has no such function or output, or if the function
            refuses the inputs.
        got: the value from rlx; None if it was not computed.
        expected: the value of the record.
        reason: why it is unknown.
    """

    record: str
    output: str
    status: Status
    got: Any
    expected: Any
    reason: str | None = None


def check_golden_record(
    record: GoldenRecord, *, rtol: float = 1e-6, atol: float = 1e-9
) -> Iterator[GoldenFinding]:
    """Calls the function of a record once and compares every output.

    Args:
        record: the worked example.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    got, reason = _compute_outputs(record)
    for output, expected in record.outputs.items():
        if output in got:
            status: Status = "ok" if agrees(got[output], expected, rtol, atol) else "differs"
            yield GoldenFinding(record.id, output, status, got[output], expected)
        else:
            why = reason or f"{record.function} gives {', '.join(got)}"
            yield GoldenFinding(record.id, output, "unknown", None, expected, why)


def _compute_outputs(record: GoldenRecord) -> tuple[dict[str, Any], str | None]:
    """Outputs by name; none, and the reason, if they cannot be computed."""
    try:
        return find_golden_function(record.function).call(record.inputs, record.options), None
    except _REFUSED as error:
        return {}, str(error) or type(error).__name__
