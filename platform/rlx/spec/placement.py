"""Descriptors of the placements that rlx ships (entry-point group `rlx.placements`)."""

from typing import ClassVar, Literal

from rlx.plugin import Placement

__all__ = ["FinalTokenOnly", "TurnEnd", "TurnProportional"]


class TurnProportional(Placement):
    """A turn's reward in equal shares on its tokens, that of the rollout on all tokens."""

    implementation: ClassVar[str] = "rlx.credit:place_in_shares"


class TurnEnd(Placement):
    """A turn's reward on its last token, that of the rollout on the row's last token."""

    implementation: ClassVar[str] = "rlx.credit:place_at_turn_ends"


class FinalTokenOnly(Placement):
    """All rewards on the row's last token, those of turns averaged."""

    implementation: ClassVar[str] = "rlx.credit:place_at_row_end"
    turn_reduce: ClassVar[Literal["sum", "mean"]] = "mean"
    needs_turn_tokens: ClassVar[bool] = False
