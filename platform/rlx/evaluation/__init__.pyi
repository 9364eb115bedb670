from .answer_scaling import compute_pass_at_k
from .answers import ScoredAnswer, compute_answer_metrics, read_answers
from .calibration import Calibration
from .corrected import (
    compute_debiased_ece,
    compute_one_bit_auroc,
    compute_recalibrated_brier,
    halve_problems,
    recalibrate_confidences,
)
from .distributions import TurnDistribution, draw_distributions
from .held_out import (
    collect_stated_confidences,
    compute_held_out_metrics,
    compute_identical_share,
    draw_test_problems,
    find_correctness_reward,
    limit_to_one_answer,
)
from .intervals import compute_bootstrap_intervals
from .pictures import draw_learning_curves, draw_reliability_diagram, render_reliability_text
from .problem_statistics import FIGURES, EvaluationAnswers, ProblemDifference, compare_by_problem
from .scores import (
    build_reliability_bins,
    compute_auroc,
    compute_brier,
    compute_brier_skill,
    compute_clipped_nll,
    compute_confidence_entropy,
    compute_equal_mass_ece,
    compute_expected_calibration_error,
    compute_extreme_share,
    compute_maximum_calibration_error,
    compute_murphy_decomposition,
    compute_wilson_interval,
    compute_within_auroc,
)
from .seed_statistics import (
    SeedDifference,
    SeedMean,
    compute_paired_difference,
    compute_seed_mean,
    correct_p_values,
)
from .selective import (
    compute_accuracy_at_coverage,
    compute_aurc,
    compute_coverage_at_risk,
    compute_error_auprc,
    compute_excess_aurc,
    compute_risk_coverage,
)
from .step_pictures import EvaluationPoint, draw_accuracy_and_ece
from .style import BLUE, FAINT, INK, ORANGE, SERIES, build_figure, save_figure, style_axes
from .suite_pictures import draw_suite

__all__ = [
    "BLUE",
    "FAINT",
    "FIGURES",
    "INK",
    "ORANGE",
    "SERIES",
    "Calibration",
    "EvaluationAnswers",
    "EvaluationPoint",
    "ProblemDifference",
    "ScoredAnswer",
    "SeedDifference",
    "SeedMean",
    "TurnDistribution",
    "build_figure",
    "build_reliability_bins",
    "collect_stated_confidences",
    "compare_by_problem",
    "compute_accuracy_at_coverage",
    "compute_answer_metrics",
    "compute_aurc",
    "compute_auroc",
    "compute_bootstrap_intervals",
    "compute_brier",
    "compute_brier_skill",
    "compute_clipped_nll",
    "compute_confidence_entropy",
    "compute_coverage_at_risk",
    "compute_debiased_ece",
    "compute_equal_mass_ece",
    "compute_error_auprc",
    "compute_excess_aurc",
    "compute_expected_calibration_error",
    "compute_extreme_share",
    "compute_held_out_metrics",
    "compute_identical_share",
    "compute_maximum_calibration_error",
    "compute_murphy_decomposition",
    "compute_one_bit_auroc",
    "compute_paired_difference",
    "compute_pass_at_k",
    "compute_recalibrated_brier",
    "compute_risk_coverage",
    "compute_seed_mean",
    "compute_wilson_interval",
    "compute_within_auroc",
    "correct_p_values",
    "draw_accuracy_and_ece",
    "draw_distributions",
    "draw_learning_curves",
    "draw_reliability_diagram",
    "draw_suite",
    "draw_test_problems",
    "find_correctness_reward",
    "halve_problems",
    "limit_to_one_answer",
    "read_answers",
    "recalibrate_confidences",
    "render_reliability_text",
    "save_figure",
    "style_axes",
]
