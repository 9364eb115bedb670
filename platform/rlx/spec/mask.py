"""Mask strategies that rlx ships: descriptors, found through the entry-point group `rlx.masks`."""

from typing import ClassVar, Literal

from rlx.plugin import Mask

__all__ = ["TurnSpans"]


class TurnSpans(Mask):
    """Tokens inside the spans that each kind of turn declares; the rest of the turn stays out."""

    implementation: ClassVar[str] = "rlx.mask:turn_spans"

    fallback: Literal["response", "none"] = "response"
    """Where a turn has none of its spans: the whole response learns, so that format failures are
    corrected, or nothing does (design 004 read literally)."""
    include_eos: bool = True
    """The token that ends the turn learns too."""
