"""Mask strategies that rlx ships: descriptors, found through the entry-point group `rlx.masks`."""

from typing import ClassVar, Literal

from rlx.plugin import Mask

__all__ = ["AllResponse", "Effective", "ModelTokens", "TurnSpans"]

Truncated = Literal["learn", "skip"]


class AllResponse(Mask):
    """Everything from the row's first own token on, what an environment wrote included."""

    implementation: ClassVar[str] = "rlx.mask:select_response_tokens"
    beyond_own: ClassVar[bool] = True


class ModelTokens(Mask):
    """Every token that the policy wrote, and no other."""

    implementation: ClassVar[str] = "rlx.mask:select_model_tokens"

    truncated: Truncated = "learn"
    """Whether a row in which a turn ran out of tokens learns at all."""


class Effective(Mask):
    """Design 000's rule: model tokens in multi-turn runs with `state_masking`, else everything."""

    implementation: ClassVar[str] = "rlx.mask:select_effective_tokens"
    beyond_own: ClassVar[bool] = True

    state_masking: bool = True
    """Leave environment tokens out of KL, GAE, GRPO and score alike."""

    def reaches_beyond(self) -> bool:
        return not self.state_masking


class TurnSpans(Mask):
    """Tokens inside the spans that each kind of turn declares; the rest of the turn stays out."""

    implementation: ClassVar[str] = "rlx.mask:select_span_tokens"

    fallback: Literal["response", "none"] = "response"
    """Where a turn has none of its spans: the whole response learns, so that format failures are
    corrected, or nothing does (design 004 read literally)."""
    include_eos: bool = True
    """The token that ends the turn learns too; design 004 read literally leaves it out."""
    truncated: Truncated = "learn"
    """Whether a row in which a turn ran out of tokens learns at all."""
