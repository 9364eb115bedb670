"""A family of records: which they are, and how each of their outputs is computed."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlx.testing.golden.compare import OUTSIDE
from rlx.testing.golden.record import GoldenRecord

__all__ = ["Calculation", "RecordFamily", "unpack_masked_tensor", "unpack_tensor"]

Calculation = Callable[[GoldenRecord, str], Any]
"""From a record and the name of an output to its value, in plain Python."""


@dataclass(frozen=True)
class RecordFamily:
    """Records about one thing.

    Attributes:
        ids: records that are known to be of it.
        fits: whether another record is, by its inputs.
        outputs: from patterns of whole names of outputs to how they are computed.
    """

    ids: frozenset[str]
    fits: Callable[[GoldenRecord], bool]
    outputs: Mapping[str, Calculation]

    def calculation(self, output: str) -> Calculation | None:
        """How an output of this name is computed; None if the family does not say."""
        for pattern, calculation in self.outputs.items():
            if re.fullmatch(pattern, output, re.IGNORECASE):
                return calculation
        return None


def unpack_tensor(tensor: Tensor, like: Any = None) -> Any:
    """Numbers and lists. With `like`, an input without its batch, a batch of one is unpacked."""
    values = tensor.tolist()
    alone = like is not None and not (like and isinstance(like[0], list))
    return values[0] if alone else values


def unpack_masked_tensor(tensor: Tensor, mask: Tensor, like: Any) -> Any:
    """As `plain`; outside the mask `OUTSIDE`, which agrees with anything."""
    rows = [
        [value if learns else OUTSIDE for value, learns in zip(*row, strict=True)]
        for row in zip(tensor.tolist(), mask.tolist(), strict=True)
    ]
    return rows if like and isinstance(like[0], list) else rows[0]
