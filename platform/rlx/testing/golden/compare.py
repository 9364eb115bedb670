"""Compares computed and expected values inside the mask."""

import math
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["OUTSIDE", "Status", "compare_output"]

Status = Literal["ok", "differs", "unknown", "quoted"]


class _OutsideMask:
    """Marks positions outside the mask, where a record's number is a placeholder."""

    def __repr__(self) -> str:
        return "·"


OUTSIDE = _OutsideMask()


def compare_output(got: Any, expected: Any, rtol: float, atol: float) -> Status:
    """The worst status over all values in `expected`; a value that `got` lacks is unknown."""
    if got is OUTSIDE:
        return "ok"
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or (got and not expected):
            return "differs"
        return _select_worst_status(
            compare_output(got[key], value, rtol, atol) if key in got else "unknown"
            for key, value in expected.items()
        )
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return "differs"
        return _select_worst_status(
            compare_output(g, e, rtol, atol) for g, e in zip(got, expected, strict=True)
        )
    return "ok" if _is_within_tolerance(got, expected, rtol, atol) else "differs"


def _select_worst_status(statuses: Any) -> Status:
    found = set(statuses)
    return "differs" if "differs" in found else "unknown" if "unknown" in found else "ok"


def _is_within_tolerance(got: Any, expected: Any, rtol: float, atol: float) -> bool:
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return math.isclose(got, expected, rel_tol=rtol, abs_tol=atol) or got == expected
    return type(got) is type(expected) and got == expected
