"""Descriptors of an estimator and a mask; only a run imports their implementations."""

from typing import ClassVar

from rlx.plugin import Estimator, Mask


class LeaveOneOut(Estimator):
    """Score minus the mean of the other scores of its group (RLOO, Ahmadian et al. 2024)."""

    implementation: ClassVar[str] = "rlx_example.tensors:leave_one_out"

    scale: float = 1.0
    """Multiplies the advantages."""


class OneSpan(Mask):
    """The tokens of one named span; the whole response if the span was not found."""

    implementation: ClassVar[str] = "rlx_example.tensors:one_span"

    span: str = "answer"
    """Name of the span; its tags are in the mask too."""
