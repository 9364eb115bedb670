"""Finds the calculation for an output and compares its result."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlx.errors import RlxError
from rlx.testing.golden import (
    advantages,
    confidences,
    losses,
    placements,
    scores,
    turn_advantages,
)
from rlx.testing.golden.compare import Status, compare_output
from rlx.testing.golden.family import RecordFamily
from rlx.testing.golden.record import GoldenRecord

__all__ = ["GoldenFinding", "check_golden_record"]

FAMILIES: tuple[RecordFamily, ...] = (
    placements.COMPOSITION,
    placements.MASS,
    placements.KL,
    placements.CONTROLLER,
    placements.RETURNS_SCORE,
    advantages.BI_LEVEL,
    advantages.REINFORCE,
    advantages.GAE,
    turn_advantages.UNIFORM,
    turn_advantages.MULTITURN,
    turn_advantages.MT_GRPO,
    turn_advantages.GIGPO,
    turn_advantages.TREE,
    advantages.OUTCOME,
    confidences.FIELD,
    confidences.PROJECTION,
    confidences.SECOND_LEVEL,
    confidences.SIBLINGS,
    confidences.BRIER,
    confidences.RLCR,
    advantages.GROUPS,
    losses.GSPO,
    losses.SURROGATE,
    losses.AGGREGATION,
    scores.COUNTDOWN,
    scores.CALIBRATION,
    scores.SHARES,
    placements.PLACEMENT,
)
"""If several families fit, the first that knows the output computes it."""

_MISFITS = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError),
    RlxError,
)
"""Exceptions that a calculation raises on a record whose inputs have an unexpected form."""


@dataclass(frozen=True)
class GoldenFinding:
    """Result for one output.

    Attributes:
        status: "ok"; "differs"; "unknown" if no calculation exists; "quoted" if the record only
            quotes a text's claim, which is not recomputed.
        got: the value from rlx; None if it was not computed.
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
    """Recomputes every output of a record and compares it.

    Args:
        record: the worked example.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    for output, expected in record.outputs.items():
        if output.endswith("_claims"):
            yield GoldenFinding(
                record.id, output, "quoted", None, expected, "quoted from a text, not computed"
            )
            continue
        got, reason = _compute_output(record, output)
        status = "unknown" if reason else compare_output(got, expected, rtol, atol)
        yield GoldenFinding(record.id, output, status, got, expected, reason)


def _compute_output(record: GoldenRecord, output: str) -> tuple[Any, str | None]:
    """Returns (value, None), or (None, reason) if the output cannot be computed."""
    known = [f for f in FAMILIES if record.id in f.ids]
    fitting = [f for f in FAMILIES if f not in known and f.fits(record)]
    reasons = []
    for family in (*known, *fitting):
        calculation = family.calculation(output)
        if calculation is None:
            continue
        try:
            return calculation(record, output), None
        except _MISFITS as error:
            reasons.append(f"{error}" or type(error).__name__)
    return None, reasons[0] if reasons else "rlx has no calculation for it"
