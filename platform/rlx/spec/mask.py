"""Descriptors of the mask strategies that rlx ships (entry-point group `rlx.masks`)."""

from typing import ClassVar, Literal

from rlx.plugin import Mask, Placement

Truncated = Literal["learn", "skip"]


class AllResponse(Mask):
    """Every token from the row's first own token on, environment tokens included."""

    implementation: ClassVar[str] = "rlx.mask:select_response_tokens"
    beyond_own: ClassVar[bool] = True


class ModelTokens(Mask):
    """Exactly the tokens that the policy generated."""

    implementation: ClassVar[str] = "rlx.mask:select_model_tokens"

    truncated: Truncated = "learn"
    """Whether rows with a truncated turn are trained on."""


class Effective(Mask):
    """KG-R1's rule: model tokens in multi-turn runs with `state_masking`, otherwise every token."""

    implementation: ClassVar[str] = "rlx.mask:select_effective_tokens"
    beyond_own: ClassVar[bool] = True

    state_masking: bool = True
    """Exclude environment tokens from KL, GAE, GRPO and the score."""

    def reaches_beyond(self) -> bool:
        return not self.state_masking


class TurnSpans(Mask):
    """Only the tokens inside the spans that each kind of turn declares."""

    implementation: ClassVar[str] = "rlx.mask:select_span_tokens"

    fallback: Literal["response", "none"] = "response"
    """For a turn without any of its spans: response trains on the whole turn, so that format
    failures are corrected; none masks it out (the literal reading of RLCR in two turns)."""
    include_eos: bool = True
    """Include the token that ends the turn; the literal reading of RLCR in two turns excludes
    it."""
    hull: bool = False
    """Join the spans of a turn: from the start of the first declared one to the end of the last
    one, or to the end of the turn if that is not closed. The profile `rlcr` turns it on."""
    truncated: Truncated = "learn"
    """Whether rows with a truncated turn are trained on."""


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
