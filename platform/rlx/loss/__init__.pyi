from .correction import CorrectionWeights, compute_correction_weights, compute_sampler_mismatch
from .expected import ExpectedScores, compute_expected_score_loss, compute_proper_scores
from .objectives import (
    ETA,
    aggregate_losses,
    aggregation_weights,
    clipped_surrogate,
    compute_cispo_loss,
    compute_unclipped_loss,
    entropy_weights,
    sequence_log_ratio,
    value_loss,
)

__all__ = [
    "ETA",
    "CorrectionWeights",
    "ExpectedScores",
    "aggregate_losses",
    "aggregation_weights",
    "clipped_surrogate",
    "compute_cispo_loss",
    "compute_correction_weights",
    "compute_expected_score_loss",
    "compute_proper_scores",
    "compute_sampler_mismatch",
    "compute_unclipped_loss",
    "entropy_weights",
    "sequence_log_ratio",
    "value_loss",
]
