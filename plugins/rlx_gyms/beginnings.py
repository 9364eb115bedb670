"""Draws first observations of a game for a split."""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from rlx.plugin import Split

__all__ = ["Beginning", "draw_beginning"]

_ATTEMPTS = 1000


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a game begins.

    Attributes:
        seed: seed of the game.
        shown: what the game shows first.
        identity: what decides the split: `shown`, or the seed of a game that always shows the same.
    """

    seed: int
    shown: str
    identity: str


def draw_beginning(key: str, split: Split, held_out: int, show: Callable[[int], str]) -> Beginning:
    """Draws seeds until the hash of a beginning says that it belongs to a split.

    Args:
        key: seed of the draws; begins with the name of the game.
        split: which split.
        held_out: one in so many beginnings is held out for testing.
        show: returns what the game with a seed shows first; raises ValueError for a seed that the
            game cannot open.

    Raises:
        ValueError: no beginning is for this split.
    """
    rng, fault = random.Random(key), ""
    varies = show(0) != show(1)
    for _ in range(_ATTEMPTS):
        drawn = rng.getrandbits(31)
        try:
            shown = show(drawn)
        except ValueError as error:
            fault = f"; {error}"
            continue
        identity = shown if varies else str(drawn)
        if (zlib.crc32(identity.encode()) % held_out == 0) == (split == "test"):
            return Beginning(drawn, shown, identity)
    raise ValueError(f"{key}: none of {_ATTEMPTS} beginnings falls into the split {split!r}{fault}")
