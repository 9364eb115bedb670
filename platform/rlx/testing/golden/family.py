"""A family of records, with the calculation of each of its outputs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlx.testing.golden.compare import OUTSIDE
from rlx.testing.golden.record import GoldenRecord

__all__ = ["Calculation", "RecordFamily", "unpack_masked_tensor", "unpack_tensor"]

Calculation = Callable[[GoldenRecord, str], Any]
"""Maps a record and the name of an output to its value, in plain Python."""


@dataclass(frozen=True)
class RecordFamily:
    """Records about one subject.

    Attributes:
        ids: records known to belong to the family.
        fits: whether another record belongs to it, judged by its inputs.
        outputs: maps regular expressions for whole output names to calculations.
    """

    ids: frozenset[str]
    fits: Callable[[GoldenRecord], bool]
    outputs: Mapping[str, Calculation]

    def calculation(self, output: str) -> Calculation | None:
        """The calculation for an output of this name; None if the family has none."""
        for pattern, calculation in self.outputs.items():
            if re.fullmatch(pattern, output, re.IGNORECASE):
                return calculation
        return None


def unpack_tensor(tensor: Tensor, like: Any = None) -> Any:
    """Converts to numbers and lists. Unpacks a batch of one if `like` has no batch dimension."""
    values = tensor.tolist()
    alone = like is not None and not (like and isinstance(like[0], list))
    return values[0] if alone else values


def unpack_masked_tensor(tensor: Tensor, mask: Tensor, like: Any) -> Any:
    """Like `unpack_tensor`; positions outside the mask become `OUTSIDE`, which equals anything."""
    rows = [
        [value if learns else OUTSIDE for value, learns in zip(*row, strict=True)]
        for row in zip(tensor.tolist(), mask.tolist(), strict=True)
    ]
    return rows if like and isinstance(like[0], list) else rows[0]
