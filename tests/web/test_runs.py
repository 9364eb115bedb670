"""The page of runs: grouped, folded over seeds, filtered, and alive."""

import pytest
from scipy import stats
from shown import silence, submit


def test_the_page_shows_what_the_registry_says(plain, known):
    (group,) = plain.twin("/")["groups"]
    assert (group["name"], group["digest"], group["seeds"]) == ("plain", "d" * 64, [0, 1])
    assert group["statuses"] == {"running": 1, "finished": 1}
    assert [run["id"] for run in group["runs"]] == ["r-0002", "r-0001"]
    for run in group["runs"]:
        record = known.run(run["id"])
        for field in ("seed", "step", "steps_total", "created", "started", "ended", "host", "pid"):
            assert run[field] == getattr(record, field), field
        assert run["status"] == record.effective_status
        assert run["figures"]["accuracy"] == {"step": 3, "value": 0.625}
        assert run["figures"]["brier"] is None
        assert "directory" not in run and "spec" not in run
    text = plain.page("/").cells()
    for said in ("2 runs plain dddddddd 2 seeds", "running finished", "3 /10", "0.625", "r-0002"):
        assert said in text, said


def test_the_headline_is_the_curve_of_the_newest_run_that_has_one(empty, registry):
    older = submit(registry)
    submit(registry, seed=1)
    for step in (1, 2, 3):
        registry.results.add_metrics(older, step, {"train/reward": step / 8, "train/loss": 9.0})
    (group,) = empty.twin("/")["groups"]
    assert group["headline"] == {
        "name": "train/reward",
        "run": older,
        "value": 0.375,
        "points": [[1, 0.125], [2, 0.25], [3, 0.375]],
    }
    registry.results.add_metrics(older, 4, {"rewards/accuracy/mean": 0.5})
    assert empty.twin("/")["groups"][0]["headline"]["name"] == "rewards/accuracy/mean"


def test_seeds_are_folded_into_mean_and_students_interval(empty, registry):
    for digest, values in (
        ("a", [0.25, 0.5]),
        ("b", [0.1, 0.4, 0.2, 0.9]),
        ("c", [0.5, 0.5, 0.5]),
    ):
        for seed, value in enumerate(values):
            submit(registry, seed, digest=digest, accuracy=value)
        figure = empty.twin("/")["groups"][0]["figures"]["accuracy"]
        mean, error = sum(values) / len(values), stats.sem(values)
        assert figure["mean"] == pytest.approx(mean)
        expected = stats.t.interval(0.95, len(values) - 1, mean, error) if error else (mean, mean)
        assert (figure["low"], figure["high"]) == pytest.approx(expected), values
        assert figure["n"] == len(values)
        assert f"{mean:.4g}" in empty.page("/").text


def test_what_is_folded(empty, registry):
    """The newest finished run of every seed; none that goes on, failed, or was only looked at
    before training."""
    submit(registry, 0, accuracy=0.9)
    submit(registry, 0, accuracy=0.5)
    submit(registry, 1, accuracy=0.25, status="failed")
    submit(registry, 2, accuracy=0.125, status="running")
    untrained = submit(registry, 3)
    registry.results.add_metrics(untrained, 0, {"eval/held_out/accuracy": 0.01})
    (group,) = empty.twin("/")["groups"]
    assert group["figures"]["accuracy"] == {"mean": 0.5, "low": None, "high": None, "n": 1}
    assert group["runs"][0]["figures"]["accuracy"] == {"step": 0, "value": 0.01}
    assert "(0.01)" in empty.page("/").text


@pytest.fixture
def several(empty, registry):
    submit(registry, 0, name="Alpha")
    submit(registry, 1, name="Alpha", status="failed")
    submit(registry, 0, name="beta", digest="b", status="running")
    registry.update_run("3", host="Node-7")
    submit(registry, 0, name="gamma", digest="c", status="queued")
    return empty


WORDS = {
    "": [4, 3, 2, 1],
    "alpha": [2, 1],
    "ALPHA failed": [2],
    "r-0003": [3],
    "node-7": [3],
    "bbbb": [3],
    "status:failed": [2],
    "status:fail": [],
    "seed:1": [2],
    "name:Alpha": [2, 1],
    "name:ALPHA": [2, 1],
    "name:alph": [],
    "status:finished seed:0": [1],
    "gamma:x": [],
    "group:none": [],
    "%": [],
    "_": [],
}
"""Runs that have all of some words, newest first."""


def test_words_that_a_run_must_have(several):
    found = {}
    for words in WORDS:
        data = several.twin("/", params={"q": words})
        ids = [int(run["id"][2:]) for group in data["groups"] for run in group["runs"]]
        assert data["total"] == len(ids), words
        page = several.page("/", params={"q": words})
        assert page.values("data-run") == [f"r-{n:04d}" for n in ids], words
        assert f"\n{len(ids)} run{'s' if len(ids) != 1 else ''}\n" in page.text, words
        assert (f"No run matches {words}" in page.text) == (not ids), words
        found[words] = ids
    assert found == WORDS


def test_experiments_come_by_the_screenful(empty, registry):
    for n in range(31):
        submit(registry, name=f"n{n:02d}", digest=f"{n % 10}")
    first, last = empty.twin("/"), empty.twin("/?page=2")
    assert (first["page"], first["pages"], first["total"]) == (1, 2, 31)
    assert [g["name"] for g in first["groups"]] == [f"n{n:02d}" for n in range(30, 0, -1)]
    assert [g["name"] for g in last["groups"]] == ["n00"]
    assert empty.twin("/?page=900")["page"] == 2
    assert "/?q=&page=2" in empty.page("/").values("href")
    assert "/?q=n&page=1" in empty.page("/?page=2&q=n").values("href")
    assert empty.get("/?page=0").status_code == 422


def test_a_silent_run_is_lost(empty, registry):
    for lost, status in enumerate(("running", "submitted"), start=1):
        run = submit(registry, digest=status[0], status=status)
        assert empty.twin("/")["groups"][0]["statuses"] == {status: 1}
        silence(registry, run)
        data = empty.twin("/")
        assert data["groups"][0]["statuses"] == {"lost": 1}
        assert not data["groups"][0]["open"]
        assert empty.twin("/", params={"q": "status:lost"})["total"] == lost
        assert empty.twin("/", params={"q": f"status:{status}"})["total"] == 0
        assert "badge lost" in empty.page("/").values("class")
        assert empty.twin(f"/runs/{run}")["run"]["status"] == "lost"
        live = empty.get("/live.json").json()
        assert live["statuses"] == {"lost": lost}
        assert live["runs"][0]["status"] == "lost"


def test_the_filter_knows_what_plugins_default_to(empty, registry):
    """A run that relies on a default, one that writes it, and one with another value."""
    for seed, written in enumerate(({}, {"normalize": "center"}, {"normalize": "std"})):
        options = {"normalize": "center", "weights": {"Answer": 0.5}, **written}
        submit(
            registry, seed, spec={"estimator": {"name": "two_level", **written}},
            plugins=[{"kind": "estimator", "name": "two_level", "options": options}],
        )  # fmt: skip
    wanted = {
        "normalize:center": [2, 1],
        "estimator.normalize:center": [2, 1],
        "normalize:std": [3],
        "weights.answer:0.5 seed:1": [2],
        "ormalize:center": [],
        "normalize:cent": [],
    }
    found = {
        words: [
            int(run["id"][2:])
            for group in empty.twin("/", params={"q": words})["groups"]
            for run in group["runs"]
        ]
        for words in wanted
    }
    assert found == wanted
