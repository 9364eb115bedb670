"""Compares computed and expected values."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["agrees"]


def agrees(got: Any, expected: Any, rtol: float, atol: float) -> bool:
    """Whether a value agrees with what is expected, to within the tolerances.

    An object agrees if every key that is expected does. null in a list agrees with anything: what
    stands outside a mask is not compared.
    """
    if isinstance(expected, Mapping):
        return isinstance(got, Mapping) and all(
            key in got and agrees(got[key], value, rtol, atol) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(got, list)
            and len(got) == len(expected)
            and all(
                e is None or agrees(g, e, rtol, atol) for g, e in zip(got, expected, strict=True)
            )
        )
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return got == expected or math.isclose(got, expected, rel_tol=rtol, abs_tol=atol)
    return type(got) is type(expected) and bool(got == expected)
