from .correction import CorrectionWeights, compute_correction_weights, compute_sampler_mismatch
from .covariance import (
    compute_token_covariances,
    draw_covariant_tokens,
    find_largest_covariances,
    select_covariant_tokens,
)
from .expected import ExpectedScores, compute_expected_score_loss, compute_proper_scores
from .objectives import (
    ETA,
    aggregate_losses,
    aggregation_weights,
    entropy_weights,
    value_loss,
)
from .surrogates import (
    clip_log_ratio,
    clipped_surrogate,
    compute_cispo_loss,
    compute_dppo_loss,
    compute_sapo_loss,
    compute_unclipped_loss,
    find_close_sequences,
    find_near_tokens,
    sequence_log_ratio,
)
from .token_losses import TokenLosses, compute_token_losses

__all__ = [
    "ETA",
    "CorrectionWeights",
    "ExpectedScores",
    "TokenLosses",
    "aggregate_losses",
    "aggregation_weights",
    "clip_log_ratio",
    "clipped_surrogate",
    "compute_cispo_loss",
    "compute_correction_weights",
    "compute_dppo_loss",
    "compute_expected_score_loss",
    "compute_proper_scores",
    "compute_sampler_mismatch",
    "compute_sapo_loss",
    "compute_token_covariances",
    "compute_token_losses",
    "compute_unclipped_loss",
    "draw_covariant_tokens",
    "entropy_weights",
    "find_close_sequences",
    "find_largest_covariances",
    "find_near_tokens",
    "select_covariant_tokens",
    "sequence_log_ratio",
    "value_loss",
]
