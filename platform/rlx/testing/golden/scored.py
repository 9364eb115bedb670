"""Scores of answers, and what is said of many of them."""

import re
from collections.abc import Callable
from typing import Any

import torch

from rlx.credit.place import place
from rlx.evaluation import scores, selective
from rlx.testing.golden.family import Family
from rlx.testing.golden.record import Lacking, Record
from rlx_plugins.countdown import compute_score, verify_equation_strict

__all__ = ["CALIBRATION", "COUNTDOWN", "SHARES"]


def _answers(record: Record) -> list[tuple[str, dict[str, Any]]]:
    truth = {
        "target": record.get("target"),
        "numbers": record.get("numbers", "nums"),
    }
    return [(text, truth) for text in record.get("solutions", "responses", "solution_strs")]


def _options(record: Record) -> dict[str, Any]:
    return {
        "format_score": record.get("format_score", default=0.1),
        "score": record.get("score", default=1.0),
    }


def _scores(record: Record, name: str) -> list[float]:
    return [compute_score(*answer, **_options(record)) for answer in _answers(record)]


def _correct(record: Record, name: str) -> list[bool]:
    return [verify_equation_strict(*answer, **_options(record)) for answer in _answers(record)]


def _reward_tensor(record: Record, name: str) -> list[float]:
    """The first answer's score on the last valid token of its response."""
    width, length = record.get("response_len"), record.get("valid_response_length")
    mask = (torch.arange(width) < length)[None]
    nothing = torch.zeros(1, 0, dtype=torch.float64)
    score = torch.tensor(_scores(record, name)[:1], dtype=torch.float64)
    ids = torch.ones(mask.shape, dtype=torch.int64)
    placed = place(nothing, nothing.bool(), score, ids, mask, placement="final_token_only")
    return placed.token_rewards[0].tolist()


COUNTDOWN = Family(
    frozenset({"g16"}),
    lambda r: r.has("solutions", "responses", "solution_strs"),
    {
        "scores": _scores,
        "probe_is_correct|is_correct|correct": _correct,
        "reward_tensor.*": _reward_tensor,
    },
)

_COUNTS = ("correct_counts", "correct_count", "k", "successes")
_Z_95 = 1.959963984540054


def _shares(record: Record, name: str) -> list[float]:
    return [k / record.get("n") for k in record.get(*_COUNTS)]


def _wilson(record: Record, name: str) -> list[list[float]]:
    if abs(record.get("z", default=_Z_95) - _Z_95) > 1e-6:
        raise Lacking("rlx has intervals at 95 % alone, z = 1.96")
    return [list(scores.wilson_interval(k, record.get("n"))) for k in record.get(*_COUNTS)]


SHARES = Family(
    frozenset({"g17"}),
    lambda r: r.has(*_COUNTS) and r.has("n"),
    {"confidence|share|mc_confidence|p_correct": _shares, "wilson.*": _wilson},
)


# Calibration ------------------------------------------------------------------------------------

_FIGURES: dict[str, Callable[..., float | None]] = {
    "accuracy": lambda y, c: float(sum(y) / len(y)),
    "mean_confidence": lambda y, c: float(sum(c) / len(c)),
    "brier": scores.brier,
    "brier_skill": scores.brier_skill,
    "auroc": scores.auroc,
    "ece": scores.expected_calibration_error,
    "mce": scores.maximum_calibration_error,
    "reliability": lambda y, c: scores.murphy_decomposition(y, c).reliability,
    "resolution": lambda y, c: scores.murphy_decomposition(y, c).resolution,
    "uncertainty": lambda y, c: scores.murphy_decomposition(y, c).uncertainty,
}


def _pairs(record: Record) -> tuple[list[int], list[float]]:
    correct = record.get("correct", "labels", "acc", "y")
    return correct, record.get("confidence", "conf", "confidences", "c")


def _figure(record: Record, name: str) -> float | None:
    figure = _FIGURES[name]
    if name in ("ece", "mce"):
        return figure(*_pairs(record), bins=record.get("n_bins", "bins", default=10))
    return figure(*_pairs(record))


def _bins(record: Record, name: str) -> list[dict[str, Any]]:
    """Those that hold something."""
    count = record.get("n_bins", "bins", default=10)
    return [
        {"bin": i, "n": b.n, "conf": b.confidence, "acc": b.accuracy}
        for i, b in enumerate(scores.reliability_bins(*_pairs(record), bins=count))
        if b.n
    ]


def _risks(record: Record, name: str) -> list[float]:
    risks: list[float] = selective.risk_coverage(*_pairs(record), ties="stable").tolist()
    return risks


def _at_coverage(record: Record, name: str) -> float:
    share = int(re.findall(r"\d+", name)[0]) / 100
    return selective.accuracy_at_coverage(*_pairs(record), share, ties="stable")


CALIBRATION = Family(
    frozenset({"g28", "g29"}),
    lambda r: r.has("correct") and r.has("confidence"),
    {
        "|".join(_FIGURES): _figure,
        "bins": _bins,
        "risk_at_coverage": _risks,
        "aurc": lambda r, n: selective.aurc(*_pairs(r), ties="stable"),
        r"acc(uracy)?_at_\d+pct_coverage": _at_coverage,
    },
)
