"""Figures of probes, from samples made by hand."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from rows import each_row

from rlx.plugin import Problem
from rlx.probe import ProbedAnswer, ProbeResult, ProbeSample
from rlx.probe.pictures import draw_probe_curves, draw_verbal_against_sampled
from rlx.probe.questions import AssembledResponse, CutPoint, Reasoning
from rlx.probe.statistics import (
    GRID,
    RecordedProbe,
    compute_agreement,
    compute_scheme_figures,
    compute_settings_digest,
    compute_verbal_bins,
    list_verbal_rows,
    point_figures,
    settings_of,
)
from rlx.spec import ProbeSpec

NOTHING = AssembledResponse((1,), "", "stop")


def answered(tokens, *, correct=True, confidences=(), answer="1"):
    """An answer behind so many tokens of reasoning; None is none."""
    ids = (7,) * (tokens or 0)
    reasoning = None if tokens is None else Reasoning(0, ids, "", (0,) * len(ids))
    return ProbedAnswer(
        problem=Problem(id=f"p{tokens}", prompt="?", fields={}),
        text="",
        answer=answer,
        correct=correct,
        confidences=tuple(confidences),
        reasoning=reasoning,
        prompt_ids=(1,),
        turn_ids=(*ids, 2),
    )


def samples(number, whole, points, n=10, scheme="early_answering", wrapped=0):
    """`points` is {tokens kept: (samples that are right, samples that are the same)}."""
    for place, (tokens, (right, same)) in enumerate(points.items()):
        point = CutPoint(tokens, tokens / max(whole, 1), place)
        for i in range(n):
            yield ProbeSample(
                answered=number,
                scheme=scheme,
                point=point,
                seed=i,
                response=NOTHING,
                given=1,
                wrapped=i < wrapped,
                rewards={},
                global_rewards={},
                correct=None if right is None else i < right,
                same=None if same is None else i < same,
            )


def probed(*problems, scheme="early_answering", **more):
    """Each problem is (tokens of its reasoning, its points)."""
    all_samples = [
        s
        for i, (tokens, points) in enumerate(problems)
        if points
        for s in samples(i, tokens, points, scheme=scheme, **more)
    ]
    return ProbeResult(tuple(answered(tokens) for tokens, _ in problems), tuple(all_samples))


def line(whole, *same, right=0, n=10):
    """The same-answer share at evenly spaced points."""
    gaps = len(same) - 1
    return whole, {whole * i // gaps: (right, round(n * s)) for i, s in enumerate(same)}


@given(st.lists(st.one_of(st.none(), st.booleans()), min_size=1, max_size=60))
def test_the_mean_over_samples_is_k_of_those_that_could_be_scored(correct):
    base = list(samples(0, 4, {2: (0, 0)}, n=len(correct)))
    made = [
        ProbeSample(**{f: getattr(s, f) for f in s.__dataclass_fields__} | {"correct": c})
        for s, c in zip(base, correct, strict=True)
    ]
    known = [c for c in correct if c is not None]
    found = point_figures(made)
    if not known:
        assert found == []
    else:
        assert found[0].n == len(known)
        assert found[0].mc_p_correct == sum(known) / len(known) == np.mean(known)


@each_row(
    ("same", "area"),
    [
        ((0.5, 1), 0.25),
        ((1, 1), 0),
        ((0, 0), 1),
        ((0, 1), 0.5),
        ((0.2, 0.6, 1), 0.4),
        ((0, 1, 1, 1, 1), 0.125),  # its corner lies between two shares of the grid
        ((1, 0, 1), 0.5),  # curves may fall
    ],
)
def test_the_area_over_the_curve(same, area):
    found = compute_scheme_figures(probed(line(8, *same)), "early_answering", 0)
    assert found["aoc"]["mean"] == pytest.approx(area)


def test_curves_are_read_off_between_points_wherever_these_lie():
    found = compute_scheme_figures(
        probed((10, {0: (0, 0), 10: (10, 0)}), (4, {0: (0, 0), 1: (8, 0), 4: (8, 0)})),
        "early_answering",
        0,
    )
    first, second = GRID, [min(s / 0.25, 1) * 0.8 for s in GRID]
    assert [b["mean"] for b in found["p_correct"]] == pytest.approx(np.add(first, second) / 2)


def test_a_curve_without_its_ends_is_flat_there():
    """As those of mistakes, which need some reasoning."""
    found = compute_scheme_figures(
        probed((10, {5: (2, 5), 10: (8, 5)}), scheme="mistake"), "mistake", 0
    )
    assert [b["mean"] for b in found["p_correct"][:6]] == pytest.approx([0.2] * 6)
    assert found["p_correct"][-1]["mean"] == pytest.approx(0.8)
    assert found["aoc"]["mean"] == pytest.approx(0.5)


def test_the_interval_is_over_problems_and_not_over_samples():
    agreeing = probed(*[line(4, 0, 0, right=10 * (i % 2)) for i in range(20)])
    mixed = probed(*[line(4, 0, 0, right=5) for i in range(20)])
    wide, narrow = (
        compute_scheme_figures(p, "early_answering", 0)["p_correct"][0] for p in (agreeing, mixed)
    )
    assert wide["mean"] == narrow["mean"] == 0.5
    assert (narrow["low"], narrow["high"]) == (0.5, 0.5)
    # 20 problems, each all right or all wrong: about 0.5 ± 1.96 · 0.5 / √20
    assert 0.25 <= wide["low"] <= 0.32 and 0.68 <= wide["high"] <= 0.75


def test_problems_without_reasoning_are_counted_beside():
    found = compute_scheme_figures(
        probed((4, {0: (1, 1), 4: (9, 9)}), (None, {}), (None, {}), wrapped=2), "early_answering", 0
    )
    assert (found["problems"], found["samples"], found["wrapped"]) == (1, 20, 0.2)
    assert found["without_reasoning"] == pytest.approx(2 / 3)


def test_what_has_no_answer_to_compare_with_leaves_the_same_answer_curve_alone(tmp_path):
    both = compute_scheme_figures(
        probed((4, {0: (5, None), 4: (5, None)}), (8, {0: (1, 10), 8: (1, 10)})),
        "early_answering",
        0,
    )
    assert both["p_correct"][0]["mean"] == pytest.approx(0.3)
    assert both["same"][0]["mean"] == 1 and both["aoc"]["mean"] == 0
    none = compute_scheme_figures(probed((4, {0: (5, None), 4: (5, None)})), "early_answering", 0)
    assert none["aoc"]["mean"] is None and none["same"][0]["low"] is None
    assert none["p_correct"][0]["mean"] == 0.5
    settings = settings_of(ProbeSpec(), "early_answering", 0)
    bare = RecordedProbe("early_answering", 0, none | {"settings": settings, "verbal": rows(1)})
    for draw in (draw_probe_curves, draw_verbal_against_sampled):
        assert "nan" not in draw([bare], tmp_path / "bare")[1].read_text()


def test_nothing_sampled_or_scored_gives_no_figures():
    assert compute_scheme_figures(probed((None, {})), "early_answering", 0) is None
    assert compute_scheme_figures(probed((4, {0: (None, 1)})), "early_answering", 0) is None
    assert compute_scheme_figures(probed((4, {0: (1, 1)})), "filler", 0) is None


def test_stated_confidence_stands_beside_the_sampled_one_of_the_same_answer():
    answers = (
        answered(4, confidences=(0.2, math.nan, 0.6), correct=False),
        answered(5, confidences=(math.nan,)),
        answered(6),
        answered(None, confidences=(1.0,)),
        answered(0, confidences=(0.5,)),
        answered(7, confidences=(0.5,), correct=None),
    )
    points = {
        0: {0: (1, 0), 2: (5, 0), 4: (9, 0)},
        1: {0: (1, 0), 5: (9, 0)},
        2: {0: (1, 0), 6: (9, 0)},
        4: {0: (3, 0)},
        5: {0: (3, 0), 7: (9, 0)},
    }
    made = [
        s
        for scheme in ("filler", "early_answering")
        for i, p in points.items()
        for s in samples(i, len(answers[i].reasoning.token_ids), p, scheme=scheme)
    ]
    first, second = list_verbal_rows(ProbeResult(answers, tuple(made)))
    assert (first["problem_id"], first["correct"], first["verbal_conf"]) == (
        "p4",
        False,
        pytest.approx(0.4),
    )
    assert first["mc_p_correct"] == 0.9
    assert (second["problem_id"], second["mc_p_correct"]) == ("p0", 0.3)


def rows(n, seed=0):
    """Confidences that are right on average."""
    draw = np.random.default_rng(seed)
    stated, sampled = draw.random(n), draw.random(n)
    return [
        {"problem_id": f"p{i}", "correct": bool(sampled[i] > 0.5), "verbal_conf": float(stated[i]),
         "mc_p_correct": float((stated[i] + sampled[i]) / 2)}
        for i in range(n)
    ]  # fmt: skip


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
