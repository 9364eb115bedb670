"""Runs side by side: what differs first, then what came of it."""

import pytest
from scipy import stats
from shown import submit


def spec_of(registry, name="rlcr", seed=0, digest="a", **options):
    spec = {"name": name, "seed": seed, "estimator": {"name": "grpo"}, **options}
    run, _ = registry.submit(
        digest=digest * 64, seed=seed, name=name, spec=spec, yaml="", plugins=[], code={},
        environment={}, again=True,
    )  # fmt: skip
    return run.id


def test_what_runs_differ_in_comes_first(empty, registry):
    spec_of(registry, kl={"beta": 0.1})
    spec_of(registry, seed=1, kl={"beta": 0.1})
    spec_of(
        registry, name="other", digest="b", kl={"beta": 0.5}, extra=None, deep={"x": {"y": [1]}}
    )
    data = empty.twin("/compare?run=1&run=2&run=3")
    assert [(r["label"], [run["id"] for run in r["runs"]]) for r in data["recipes"]] == [
        ("A", ["r-0001", "r-0002"]),
        ("B", ["r-0003"]),
    ]
    assert data["spec"] == [
        {"path": "kl.beta", "values": [0.1, 0.5]},
        {"path": "deep.x.y", "values": [None, [1]]},
    ]
    page = empty.page("/compare?run=1&run=2&run=3")
    assert "kl.beta 0.1 0.5" in page.cells()
    assert page.text.index("Differences") < page.text.index("Curves")
    assert page.values("data-runs") == ["r-0001,r-0002;r-0003"]
    assert "Only names and seeds differ." in empty.page("/compare?run=1&run=2").text


def test_a_name_stands_for_all_its_runs_and_a_run_is_there_once(empty, registry):
    for seed in (0, 1):
        submit(registry, seed)
    submit(registry, name="kg", digest="e")
    data = empty.twin("/compare?run=rlcr&run=r-0001&run=&run=kg")
    assert [[run["id"] for run in r["runs"]] for r in data["recipes"]] == [
        ["r-0001", "r-0002"],
        ["r-0003"],
    ]
    assert data["refs"] == ["rlcr", "r-0001", "kg"]
    refused = empty.get("/compare.json?run=nobody")
    assert refused.status_code == 404
    assert "nobody" in refused.json()["error"]["message"]
    assert empty.get("/compare?" + "run=1&" * 25).status_code == 200


def test_nothing_to_compare(empty):
    assert empty.twin("/compare")["recipes"] == []
    assert "Tick runs on" in empty.page("/compare").text


def cells(data, suite, metric):
    (found,) = [s for s in data["suites"] if s["suite"] == suite]
    return next(row["cells"] for row in found["rows"] if row["metric"] == metric)


def evaluated(registry, run, metrics, label="after", step=5, suite="held_out"):
    registry.results.add_evaluation(run, step, label, suite, 9, metrics)


def test_over_seeds_the_mean_with_students_interval(empty, registry):
    values = [0.5, 0.25, 0.875]
    for seed, value in enumerate(values):
        run = submit(registry, seed)
        evaluated(registry, run, {"accuracy": 0.0}, "before", 0)
        evaluated(
            registry, run, {"accuracy": value, "ece": None, "intervals": {"accuracy": [0, 1]}}
        )
    (cell,) = cells(empty.twin("/compare?run=rlcr"), "held_out", "accuracy")
    low, high = stats.t.interval(0.95, 2, sum(values) / 3, stats.sem(values))
    assert cell == {
        "mean": pytest.approx(sum(values) / 3),
        "low": pytest.approx(low),
        "high": pytest.approx(high),
        "n": 3,
        "over": "seeds",
    }
    page = empty.page("/compare?run=rlcr")
    assert f"{low:.4g} – {high:.4g}" in page.text
    assert "3 seeds, interval over seeds" in page.values("title")
    assert "ece" not in page.cells(), "no run has it"


def test_seeds_that_end_at_the_same_moment_are_two(empty, registry, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1.7e9)
    for seed, value in enumerate((0.25, 0.75)):
        evaluated(registry, submit(registry, seed), {"accuracy": value})
    (cell,) = cells(empty.twin("/compare?run=rlcr"), "held_out", "accuracy")
    assert (cell["mean"], cell["n"]) == (0.5, 2)


def test_of_one_run_its_own_interval_over_problems(empty, registry):
    run = submit(registry)
    evaluated(
        registry, run, {"accuracy": 0.5, "brier": 0.25, "intervals": {"accuracy": [0.4, 0.6]}}
    )
    submit(registry, name="other", digest="f")
    data = empty.twin("/compare?run=1&run=2")
    assert cells(data, "held_out", "accuracy") == [
        {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 1, "over": "problems"},
        {"mean": None, "low": None, "high": None, "n": 0, "over": "seeds"},
    ]
    assert cells(data, "held_out", "brier")[0] | {"over": ""} == {
        "mean": 0.25, "low": None, "high": None, "n": 1, "over": "",
    }  # fmt: skip
    assert "accuracy 0.5 0.4 – 0.6 —" in empty.page("/compare?run=1&run=2").cells()


def test_the_newest_evaluation_of_every_suite_counts(empty, registry):
    run = submit(registry)
    for label, step, value in (("after", 4, 0.5), ("step", 5, 0.3), ("before", 0, 0.1)):
        evaluated(registry, run, {"accuracy": value}, label, step)
    evaluated(registry, run, {"accuracy": 0.2}, "step", 3, "far")
    evaluated(registry, run, {"accuracy": 0.9}, suite="probe/filler")
    data = empty.twin("/compare?run=1")
    assert [s["suite"] for s in data["suites"]] == ["held_out"], "others are not after training"
    assert cells(data, "held_out", "accuracy")[0]["mean"] == 0.5
    evaluated(registry, run, {"accuracy": 0.7}, "after", 5)
    assert cells(empty.twin("/compare?run=1"), "held_out", "accuracy")[0]["mean"] == 0.7


def test_a_seed_that_was_run_again_counts_once_and_training_alone_counts(empty, registry):
    for seed, accuracy in ((0, 0.1), (0, 0.5), (1, 0.7)):
        evaluated(registry, submit(registry, seed), {"accuracy": accuracy})
    before = submit(registry, 2)
    evaluated(registry, before, {"accuracy": 0.0}, "before", 0)
    data = empty.twin("/compare?run=rlcr")
    (cell,) = cells(data, "held_out", "accuracy")
    assert (cell["mean"], cell["n"], cell["over"]) == (pytest.approx(0.6), 2, "seeds")
    assert data["without"] == [before]
    assert "Without an evaluation after training: r-0004" in empty.page("/compare?run=rlcr").text


def test_groups_are_their_runs_and_what_is_too_much_is_said(empty, registry):
    runs = [submit(registry, seed) for seed in range(30)]
    for run in runs[:2]:
        registry.join(run, "few")
    data = empty.twin("/compare?run=few")
    assert [[run["id"] for run in r["runs"]] for r in data["recipes"]] == [runs[:2]]
    data = empty.twin("/compare?run=rlcr")
    assert data["left_out"] == runs[:6]
    assert [run["id"] for run in data["recipes"][0]["runs"]] == runs[6:]
    assert "the first 6 named are left out" in empty.page("/compare?run=rlcr").text


def test_more_recipes_than_letters(empty, registry):
    for n in range(24):
        spec_of(
            registry, name=f"n{n}", digest=f"{n:02d}"[-1] if n < 10 else chr(97 + n - 10), seed=n
        )
    data = empty.twin("/compare?" + "&".join(f"run={n + 1}" for n in range(24)))
    assert [r["label"] for r in data["recipes"]] == [chr(65 + n) for n in range(24)]
    assert empty.get("/compare?" + "&".join(f"run=n{n}" for n in range(24))).status_code == 200
