"""Histograms of rewards and lengths on the page of a run, also while it goes on."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from shown import submit

from rlx_registry import RolloutIndex
from rlx_web.pages.distributions import BARS, build_histogram


def add_step(registry, run, step, rows):
    """Rows of (kind, reward, tokens)."""
    index = [
        RolloutIndex(
            row=number, parent_row=None, tree=number, group=number, turn=kind, problem_id="p",
            reward=reward, advantage=0.0, n_tokens=tokens, finish_reason="stop", preview="",
        )
        for number, (kind, reward, tokens) in enumerate(rows)
    ]  # fmt: skip
    place = {"path": "x.parquet", "sha256": "x", "bytes": 1, "statistics": {}}
    registry.results.add_rollouts(run, step, **place, index=index)


@pytest.fixture
def run(registry):
    run = submit(registry, status="running")
    add_step(registry, run, 1, [("answer", 0.0, 4), ("answer", 1.0, 8), ("confidence", 0.5, 2)])
    add_step(registry, run, 2, [("answer", 1.0, 6), ("answer", None, 6), ("<b>", 0.25, 1)])
    return run


def test_a_run_that_goes_on_shows_its_newest_step_beside_its_first(empty, run):
    made = {d["kind"]: d for d in empty.twin(f"/runs/{run}")["distributions"]}
    assert set(made) == {"answer", "confidence", "<b>"}
    first, newest = made["answer"]["reward"]["steps"]
    assert (first["step"], first["n"], first["mean"], first["std"]) == (1, 2, 0.5, 0.5)
    assert (newest["step"], newest["n"], newest["mean"]) == (2, 1, 1.0), "absent is not zero"
    assert (first["shares"][0], first["shares"][-1], newest["shares"][-1]) == (0.5, 0.5, 1.0)
    assert [s["mean"] for s in made["answer"]["tokens"]["steps"]] == [6.0, 6.0]
    page = empty.page(f"/runs/{run}")
    for said in ("Distributions", "step 2, outlined: step 1", "answer: reward", "answer: tokens"):
        assert said in page.text, said
    assert "confidence: reward" not in page.text, "the newest step has none"
    assert "<b>: reward" in page.text, "the name of a kind is text"
    labels = [v for v in page.values("aria-label") if v and v.startswith("answer: tokens")]
    assert labels == ["answer: tokens at step 2: mean 6, σ 0"]


def test_a_run_without_rollouts_shows_none(empty, registry):
    run = submit(registry, status="running")
    assert empty.twin(f"/runs/{run}")["distributions"] == []
    assert "Distributions" not in empty.page(f"/runs/{run}").text


values = st.floats(-1e6, 1e6) | st.sampled_from([float("nan"), float("inf"), -float("inf")])
numbers = st.lists(values, max_size=20)


@given(numbers, numbers)
def test_any_values_make_shares(one, other):
    made = build_histogram({1: one, 2: other})
    for step in made["steps"]:
        assert sum(step["shares"]) == pytest.approx(1.0 if step["n"] else 0.0)
        assert len(step["shares"]) in (1, BARS)
        if step["n"]:
            assert made["low"] - 1e-9 <= step["mean"] <= made["high"] + 1e-9
