"""Titles of the figures of an evaluation, for all that show them."""

from typing import NamedTuple


class Figure(NamedTuple):
    """A figure of an evaluation.

    Attributes:
        name: its path in the recorded metrics.
        meaning: how to read it, in one line; figures without one are shown last, or on demand.
    """

    name: str
    title: str
    meaning: str = ""


FIGURES = (
    Figure("accuracy", "accuracy", "higher is better"),
    Figure("brier", "Brier score", "lower is better"),
    Figure("brier_recalibrated", "Brier, recalibrated out of fold", "near Brier: calibrated"),
    Figure("base_rate_brier", "Brier of a constant, the accuracy", "what Brier must beat"),
    Figure("stratum_brier", "Brier, knowing only the stratum", "what Brier must beat"),
    Figure("auroc", "AUROC", "higher is better"),
    Figure("auroc_one_bit", "AUROC of at least .5, yes or no", "below AUROC: more than one bit"),
    Figure("stratum_auroc", "AUROC, knowing only the stratum", "what AUROC must beat"),
    Figure("within_auroc", "AUROC within strata", "above 0.5: it knows more than the kind"),
    Figure("ece", "ECE, 10 bins", "lower is better"),
    Figure("ece_debiased", "ECE, debiased", "without small-sample bias"),
    Figure("mean_confidence", "mean confidence", "near accuracy"),
    Figure("alike_share", "all confidences alike", "1 is a frozen policy"),
    Figure(
        "unparsable",
        "unparsable confidences",
        "count as the worst; no figures if under 10 % can be read",
    ),
    Figure("signed_gap", "signed gap"),
    Figure("brier_skill", "Brier skill"),
    Figure("nll", "NLL (clipped)"),
    Figure("ece_15", "ECE, 15 bins"),
    Figure("ece_mass", "ECE, equal mass"),
    Figure("mce", "MCE"),
    Figure("auprc_error", "AUPRC of errors"),
    Figure("aurc", "AURC"),
    Figure("e_aurc", "E-AURC"),
    Figure("accuracy_at.0.5", "accuracy at 50 % coverage"),
    Figure("accuracy_at.0.8", "accuracy at 80 % coverage"),
    Figure("accuracy_at.0.9", "accuracy at 90 % coverage"),
    Figure("coverage_at.0.05", "coverage at 5 % risk"),
    Figure("coverage_at.0.1", "coverage at 10 % risk"),
    Figure("readable_share", "readable confidences"),
    Figure("distinct_share", "distinct confidences"),
    Figure("extreme_share", "within .01 of 0 or 1"),
    Figure("truncated", "cut short"),
)
