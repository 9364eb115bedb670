"""Scores of answers, and statistics over many of them."""

import re
from collections.abc import Callable
from typing import Any

import torch

from rlx.credit import place_rewards
from rlx.evaluation import (
    build_reliability_bins,
    compute_accuracy_at_coverage,
    compute_aurc,
    compute_auroc,
    compute_brier,
    compute_brier_skill,
    compute_expected_calibration_error,
    compute_maximum_calibration_error,
    compute_murphy_decomposition,
    compute_risk_coverage,
    compute_wilson_interval,
)
from rlx.testing.golden.family import RecordFamily
from rlx.testing.golden.record import GoldenRecord, MissingInputError
from rlx_plugins.countdown import compute_score, verify_equation_strict

__all__ = ["CALIBRATION", "COUNTDOWN", "SHARES"]


def _list_countdown_answers(record: GoldenRecord) -> list[tuple[str, dict[str, Any]]]:
    truth = {
        "target": record.get("target"),
        "numbers": record.get("numbers", "nums"),
    }
    return [(text, truth) for text in record.get("solutions", "responses", "solution_strs")]


def _get_score_options(record: GoldenRecord) -> dict[str, Any]:
    return {
        "format_score": record.get("format_score", default=0.1),
        "score": record.get("score", default=1.0),
    }


def _compute_countdown_scores(record: GoldenRecord, name: str) -> list[float]:
    """Scores by the default rule."""
    return [
        compute_score(*answer, **_get_score_options(record))
        for answer in _list_countdown_answers(record)
    ]


def _compute_source_scores(record: GoldenRecord, name: str) -> list[float]:
    """Scores by TinyZero's own rule."""
    return [
        compute_score(*answer, **_get_score_options(record), allow_decimals=True)
        for answer in _list_countdown_answers(record)
    ]


def _verify_countdown_answers(record: GoldenRecord, name: str) -> list[bool]:
    return [
        verify_equation_strict(*answer, **_get_score_options(record))
        for answer in _list_countdown_answers(record)
    ]


def _reward_tensor(record: GoldenRecord, name: str) -> list[float]:
    """The first answer's score on the last valid token of its response."""
    width, length = record.get("response_len"), record.get("valid_response_length")
    mask = (torch.arange(width) < length)[None]
    nothing = torch.zeros(1, 0, dtype=torch.float64)
    score = torch.tensor(_compute_countdown_scores(record, name)[:1], dtype=torch.float64)
    ids = torch.ones(mask.shape, dtype=torch.int64)
    placed = place_rewards(nothing, nothing.bool(), score, ids, mask, placement="final_token_only")
    return placed.token_rewards[0].tolist()


COUNTDOWN = RecordFamily(
    frozenset({"g16"}),
    lambda r: r.has("solutions", "responses", "solution_strs"),
    {
        "scores": _compute_countdown_scores,
        "source_scores": _compute_source_scores,
        "probe_is_correct|is_correct|correct": _verify_countdown_answers,
        "reward_tensor.*": _reward_tensor,
    },
)

_COUNTS = ("correct_counts", "correct_count", "k", "successes")
_Z_95 = 1.959963984540054


def _compute_success_shares(record: GoldenRecord, name: str) -> list[float]:
    return [k / record.get("n") for k in record.get(*_COUNTS)]


def _compute_wilson_intervals(record: GoldenRecord, name: str) -> list[list[float]]:
    if abs(record.get("z", default=_Z_95) - _Z_95) > 1e-6:
        raise MissingInputError("rlx has intervals at 95 % alone, z = 1.96")
    return [list(compute_wilson_interval(k, record.get("n"))) for k in record.get(*_COUNTS)]


SHARES = RecordFamily(
    frozenset({"g17"}),
    lambda r: r.has(*_COUNTS) and r.has("n"),
    {
        "confidence|share|mc_confidence|p_correct": _compute_success_shares,
        "wilson.*": _compute_wilson_intervals,
    },
)


# Calibration ------------------------------------------------------------------------------------

_FIGURES: dict[str, Callable[..., float | None]] = {
    "accuracy": lambda y, c: float(sum(y) / len(y)),
    "mean_confidence": lambda y, c: float(sum(c) / len(c)),
    "brier": compute_brier,
    "brier_skill": compute_brier_skill,
    "auroc": compute_auroc,
    "ece": compute_expected_calibration_error,
    "mce": compute_maximum_calibration_error,
    "reliability": lambda y, c: compute_murphy_decomposition(y, c).reliability,
    "resolution": lambda y, c: compute_murphy_decomposition(y, c).resolution,
    "uncertainty": lambda y, c: compute_murphy_decomposition(y, c).uncertainty,
}


def _get_calibration_pairs(record: GoldenRecord) -> tuple[list[int], list[float]]:
    correct = record.get("correct", "labels", "acc", "y")
    return correct, record.get("confidence", "conf", "confidences", "c")


def _compute_calibration_figure(record: GoldenRecord, name: str) -> float | None:
    figure = _FIGURES[name]
    if name in ("ece", "mce"):
        return figure(
            *_get_calibration_pairs(record), bins=record.get("n_bins", "bins", default=10)
        )
    return figure(*_get_calibration_pairs(record))


def _compute_reliability_bins(record: GoldenRecord, name: str) -> list[dict[str, Any]]:
    """Non-empty bins only."""
    count = record.get("n_bins", "bins", default=10)
    return [
        {"bin": i, "n": b.n, "conf": b.confidence, "acc": b.accuracy}
        for i, b in enumerate(build_reliability_bins(*_get_calibration_pairs(record), bins=count))
        if b.n
    ]


def _compute_risk_curve(record: GoldenRecord, name: str) -> list[float]:
    risks: list[float] = compute_risk_coverage(
        *_get_calibration_pairs(record), ties="stable"
    ).tolist()
    return risks


def _compute_coverage_output(record: GoldenRecord, name: str) -> float:
    share = int(re.findall(r"\d+", name)[0]) / 100
    return compute_accuracy_at_coverage(*_get_calibration_pairs(record), share, ties="stable")


CALIBRATION = RecordFamily(
    frozenset({"g28", "g29"}),
    lambda r: r.has("correct") and r.has("confidence"),
    {
        "|".join(_FIGURES): _compute_calibration_figure,
        "bins": _compute_reliability_bins,
        "risk_at_coverage": _compute_risk_curve,
        "aurc": lambda r, n: compute_aurc(*_get_calibration_pairs(r), ties="stable"),
        r"acc(uracy)?_at_\d+pct_coverage": _compute_coverage_output,
    },
)
