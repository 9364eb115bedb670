"""Pictures of probes, from figures made up here."""

import numpy as np
import pytest

from rlx.probe.pictures import draw_probe_curves, draw_verbal_against_sampled
from rlx.probe.statistics import (
    GRID,
    RecordedProbe,
    compute_agreement,
    compute_settings_digest,
    compute_verbal_bins,
    settings_of,
)
from rlx.spec import ProbeSpec

NOTHING = {"mean": None, "low": None, "high": None}


BANDS = [{"mean": share, "low": share / 2, "high": min(1, share + 0.1)} for share in GRID]


def rows(n, seed=0):
    """Confidences that are right on average."""
    draw = np.random.default_rng(seed)
    stated, sampled = draw.random(n), draw.random(n)
    return [
        {"problem_id": f"p{i}", "correct": bool(sampled[i] > 0.5), "verbal_conf": float(stated[i]),
         "mc_p_correct": float((stated[i] + sampled[i]) / 2)}
        for i in range(n)
    ]  # fmt: skip


def made(step=0, suite="early_answering", **figures):
    said = {
        "problems": 40, "samples": 10_000, "accuracy": 0.6, "without_reasoning": 0.1,
        "wrapped": 0.02, "p_correct": BANDS,
        "same": BANDS, "aoc": {"mean": 0.5, "low": 0.4, "high": 0.6},
        "settings": settings_of(ProbeSpec(), suite.partition("/")[0], 0), "verbal": (),
    }  # fmt: skip
    return RecordedProbe(suite, step, {**said, **figures})


def test_suites_and_steps_are_named_and_gaps_are_left_out(tmp_path):
    suites = ("early_answering", "filler", "mistake/0a1b2c3d")
    probes = [made(step, suite, verbal=rows(60, step)) for suite in suites for step in (80, 0)]
    _, svg = draw_probe_curves(probes, tmp_path / "probes")
    assert all(text in svg.read_text() for text in (*suites, "step 0: area over same 0.50"))
    _, svg = draw_verbal_against_sampled(probes, tmp_path / "v")
    assert all(text in svg.read_text() for text in ("wrong answers", "step 0", "step 80"))
    bare = made(same=[NOTHING] * len(GRID), aoc=NOTHING, verbal=rows(1))
    for draw in (draw_probe_curves, draw_verbal_against_sampled):
        assert "nan" not in draw([bare], tmp_path / "bare")[1].read_text()


def test_settings_are_what_decides_the_numbers():
    spec, other = ProbeSpec(), ProbeSpec(every=7, schemes=("filler", "early_answering"))
    of = lambda spec, seed=0: compute_settings_digest(settings_of(spec, "early_answering", seed))  # noqa: E731
    assert of(spec) == of(other)
    assert of(spec) != of(spec, seed=1)
    assert of(spec) != of(ProbeSpec(samples=3))


def test_agreement_is_distance_and_order():
    exact = [{**row, "mc_p_correct": row["verbal_conf"]} for row in rows(9)]
    found = compute_agreement(exact)
    assert (found.n, found.gap, found.rank) == (9, 0.0, pytest.approx(1.0))
    reverse = compute_agreement(
        [{**row, "mc_p_correct": 1 - row["verbal_conf"]} for row in rows(9)]
    )
    assert reverse.rank == pytest.approx(-1.0)
    assert compute_agreement([{**row, "verbal_conf": 0.5} for row in rows(9)]).rank is None
    assert compute_agreement([]) is None


def test_bins_hold_every_answer_and_its_mean():
    found = rows(200)
    bins = compute_verbal_bins(found)
    assert sum(mean.n for _, mean in bins.values()) == 200
    for place, (_, mean) in bins.items():
        low, high = place / 10, (place + 1) / 10
        inside = [r["mc_p_correct"] for r in found if low <= r["verbal_conf"] < high]
        assert (mean.n, mean.mean) == (len(inside), pytest.approx(np.mean(inside)))
        assert mean.low < mean.mean < mean.high
    assert compute_verbal_bins([{**found[0], "verbal_conf": 1.0}])[9][1].low is None
