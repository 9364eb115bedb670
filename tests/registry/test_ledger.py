"""What runs report: metrics, events, evaluations, files, rollouts."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from submissions import index_row, submit

from rlx_registry import NotFoundError, Registry


@pytest.fixture
def registry(url):
    with Registry.open(url) as opened:
        for seed in range(2):
            submit(opened, seed=seed)
        yield opened


def answer(row, **changes):
    rewards = {"accuracy": 1.0, "format": 1.0}
    given = {"reward": 1.1, "rewards": rewards, "scores": {"total_score": 1.1}, "advantage": 0.5}
    return index_row(row, **given | changes)


def test_metrics_come_back_by_name_and_step(registry):
    registry.results.add_metrics("r-0001", 2, {"loss": 0.25, "reward/mean": np.float32(0.5)})
    registry.results.add_metrics("r-0001", 1, {"loss": 1})
    registry.results.add_metrics("r-0002", 1, {"loss": 9.0})
    registry.results.add_metrics("r-0001", 3, {})
    assert registry.results.metrics("r-0001") == {
        "loss": [(1, 1.0), (2, 0.25)],
        "reward/mean": [(2, 0.5)],
    }
    assert registry.results.metrics("r-0001", names=["loss", "none"]) == {
        "loss": [(1, 1.0), (2, 0.25)]
    }
    assert registry.results.metrics("r-0001", names=[]) == {}


def test_what_is_not_finite_is_counted_named_and_leaves_nothing_stale(registry):
    registry.results.add_metrics("r-0001", 1, {"loss": 1.0, "kl": 0.1})
    registry.results.add_metrics("r-0001", 1, {"loss": math.nan, "grad": math.inf, "kl": 0.2})
    assert registry.results.metrics("r-0001") == {"kl": [(1, 0.2)], "health/nonfinite": [(1, 2.0)]}
    (event,) = registry.results.events("r-0001")
    assert (event.kind, event.level) == ("nonfinite", "warning")
    assert event.message == "step 1: not finite: grad, loss"


writes = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.dictionaries(st.sampled_from("abc"), st.floats(allow_nan=False, allow_infinity=False)),
    ),
    max_size=8,
)


@given(writes=writes, chunk=st.integers(1, 4))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_mirror_that_follows_the_sequence_ends_up_equal(registry, writes, chunk):
    run = submit(registry, again=True)
    truth, copy, cursor = {}, {}, 0
    for step, values in writes:
        registry.results.add_metrics(run.id, step, values)
        truth |= {(name, step): value for name, value in values.items()}
        for row in registry.results.metric_rows_after(run.id, cursor, chunk):
            assert row.seq > cursor
            cursor, copy[row.name, row.step] = row.seq, row.value
    while rows := registry.results.metric_rows_after(run.id, cursor, chunk):
        cursor = rows[-1].seq
        copy |= {(row.name, row.step): row.value for row in rows}
    found = registry.results.metrics(run.id)
    assert copy == truth
    assert {(n, step): value for n, series in found.items() for step, value in series} == truth


def test_one_evaluation_per_step_label_and_suite(registry):
    registry.results.add_evaluation("r-0001", 230, "after", "test", 600, {"accuracy": 0.6})
    registry.results.add_evaluation(
        "r-0001", 0, "before", "test", 600, {"accuracy": 0.3}, {"bins": [1]}
    )
    registry.results.add_evaluation(
        "r-0001", 230, "after", "test", 500, {"accuracy": 0.7, "auroc": math.nan}
    )
    before, after = registry.results.evaluations("r-0001")
    assert (before.step, before.label, before.payload) == (0, "before", {"bins": [1]})
    assert (after.n, after.metrics) == (500, {"accuracy": 0.7, "auroc": None})


def test_paths_are_kept_relative_to_the_runs_directory(registry, tmp_path):
    with pytest.raises(ValueError, match="not set yet"):
        registry.results.add_checkpoint("r-0001", 1, tmp_path / "run" / "a", 1, "x")
    registry.update_run("r-0001", directory=tmp_path / "run")
    registry.results.add_checkpoint("r-0001", 5, tmp_path / "run" / "checkpoints" / "5", 10, "x")
    registry.results.add_checkpoint("r-0001", 5, "checkpoints/5", 11, "y")
    (checkpoint,) = registry.results.checkpoints("r-0001")
    assert (checkpoint.path, checkpoint.bytes, checkpoint.sha256) == ("checkpoints/5", 11, "y")
    for path in (tmp_path / "other", "../secrets", ".", "a/../../b"):
        with pytest.raises(ValueError, match="run's directory"):
            registry.results.add_artifact("r-0001", path, "picture")


def test_an_artifact_that_changed_goes_to_the_end(registry):
    for path in ("spec.yaml", "calibration.png", "spec.yaml"):
        registry.results.add_artifact("r-0001", path, "file")
    found = registry.results.artifacts("r-0001")
    assert [(a.seq, a.path, a.kind) for a in found] == [
        (2, "calibration.png", "file"),
        (3, "spec.yaml", "file"),
    ]


def add_step(registry, step, index, **changes):
    body = {"path": f"rollouts/{step}.parquet", "sha256": "x", "bytes": 9, "statistics": {}}
    registry.results.add_rollouts("r-0001", step, **{**body, **changes}, index=index)


def test_rollouts_come_back_as_they_were(registry):
    index = [
        answer(1, parent_row=0, turn="confidence", reward=None, failed="timeout"),
        answer(0, rewards={"accuracy": np.float32(0.5), "brier": math.nan}),
    ]
    add_step(registry, 3, [answer(0), answer(2)], sha256="y")  # sampled again below
    add_step(registry, 3, index, statistics={"std": math.nan, "mean": 0.5})
    add_step(registry, 1, [])
    stored = answer(0, rewards={"accuracy": 0.5, "brier": None})
    assert registry.results.rollout_index("r-0001", 3) == [stored, index[0]]
    assert registry.results.rollout_steps("r-0001") == [1, 3]
    assert registry.results.rollout_index("r-0001", 1) == []
    body = registry.results.rollout_body("r-0001", 3)
    assert (body.path, body.sha256, body.bytes) == ("rollouts/3.parquet", "x", 9)
    assert body.statistics == {"std": None, "mean": 0.5}
    with pytest.raises(NotFoundError, match="r-0001 has no rollouts of step 2"):
        registry.results.rollout_body("r-0001", 2)


def test_any_text_survives_and_previews_are_cut(registry, url):
    hostile = "\0\x1b[31m<script>\u202e'; DROP TABLE rlx_run;--" + "x" * 300
    add_step(registry, 1, [answer(0, preview=hostile, problem_id="a\ud800b" + hostile)])
    (row,) = registry.results.rollout_index("r-0001", 1)
    kept = hostile if url.startswith("sqlite") else hostile.replace("\0", "␀")
    assert row.preview == kept[:160]
    assert row.problem_id == "a\\ud800b" + kept
    registry.results.add_event("r-0001", "k", "a\ud800b", {"said": "\0\ud800", "x": math.nan})
    registry.results.add_event("r-0001", "error", "<script>", level="error")
    event, other = registry.results.events("r-0001")
    assert (event.message, event.payload) == ("a\\ud800b", {"said": "\0\ud800", "x": None})
    assert (other.level, other.payload) == ("error", None)


@pytest.mark.parametrize("field", ["reward", "advantage"])
def test_credit_that_is_not_finite_is_refused(registry, field):
    with pytest.raises(ValueError, match=f"row 4: {field} is nan"):
        add_step(registry, 1, [answer(4, **{field: math.nan})])
    assert registry.results.rollout_steps("r-0001") == []


def test_nothing_is_recorded_for_a_run_that_is_not_there(registry):
    for call in (
        lambda: registry.results.add_metrics("r-0009", 1, {"a": 1.0}),
        lambda: registry.results.add_event("r-0009", "k", "m"),
        lambda: registry.heartbeat("r-0009"),
        lambda: registry.transition("r-0009", ["running"], "lost"),
        lambda: registry.results.metrics("r-0009"),
        lambda: registry.results.events("latest"),
    ):
        with pytest.raises(NotFoundError, match="no run"):
            call()
