"""The list of runs as a reader wants it: columns, order, config values, sweeps, notes and tags."""

from itertools import pairwise

import pytest
from shown import submit

from rlx_web.pages.columns import FIELDS, find_varied_paths
from rlx_web.pages.filters import list_config_values

RATES = (1e-5, 3e-5, 1e-4)


@pytest.fixture
def sweep(registry):
    """Three experiments of one name that differ in a rate, and one of another name."""
    for n, rate in enumerate(RATES):
        spec = {
            "name": "s",
            "learner": {"lr": rate, "clip": None},
            "phases": [{"steps": 5 + n // 2}],
        }
        run, _ = registry.submit(
            digest=str(n) * 64, seed=0, name="s", spec=spec, yaml="", plugins=[], code={},
            environment={},
        )  # fmt: skip
        registry.results.add_metrics(run.id, 5, {"train/loss": 1.0 + n})
        registry.transition(run.id, ["submitted"], "running")
        registry.transition(run.id, ["running"], "finished")
    submit(registry, name="other", digest="f")


def shown_ids(client, text, **more):
    return client.page("/", params={"q": text, **more}).values("data-run")


def test_what_a_sweep_varies_are_columns(empty, sweep):
    data = empty.twin("/")
    ids = [column["id"] for column in data["columns"]]
    assert ids[-3:] == ["config:learner.lr", "config:phases.0.steps", "age"]
    assert [g["config"]["learner.lr"] for g in data["groups"]] == [None, *reversed(RATES)]
    assert "3e-05" in empty.page("/").text
    assert empty.twin("/", params={"q": "name:other"})["columns"][-1]["id"] == "age"


def test_only_what_experiments_of_one_label_differ_in_varies():
    one, two = (
        {"a": 1, "b": {}, "name": "x", "runner.ranks": 1, "tracking.mlflow": 1},
        {"a": 1, "b": 2, "name": "y", "c": None, "runner.ranks": 2, "tracking.mlflow": 2},
    )
    assert find_varied_paths([({"l", "m"}, one), ({"l"}, two), ({"m"}, one)]) == ["b"]
    assert find_varied_paths([({"l"}, one), ({"m"}, two)]) == []
    for count, found in ((6, list("012345")), (7, [])):
        values = [({"l"}, {str(n): k for n in range(count)}) for k in (0, 1)]
        assert find_varied_paths(values) == found, "many differences are no sweep"


def test_columns_are_chosen_and_ordered_by_the_address(empty, sweep):
    asked = ["metric:train/loss", "status", "config:learner.lr", "metric:none", "status"]
    data = empty.twin("/", params={"column": asked})
    assert [column["id"] for column in data["columns"]] == list(dict.fromkeys(asked))
    assert data["groups"][1]["runs"][0]["metrics"] == {"train/loss": [5, 3.0], "none": None}
    page = empty.page("/", params={"column": asked, "q": "s"})
    assert "train/loss status" in page.cells().replace("Status", "status")
    assert page.values("value").count("config:learner.lr") >= 2, "the filter keeps the choice"
    wrong = empty.get("/", params={"column": "colour"})
    assert wrong.status_code == 422
    assert "no column" in wrong.text and all(name in wrong.text for name in FIELDS)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("learner.lr:3e-5", [2]),
        ("lr:0.00003", [2]),
        ("lr>=3e-5 phases.0.steps:5", [2]),
        ("lr<3e-5", [1]),
        ("LEARNER.LR=1e-4", [3]),
        ("clip:null", [3, 2, 1]),
        ("clip>0", []),
        ("rate:1", []),
        ("lr:fast", []),
        (">", []),
        ("a:b:c", []),
    ],
)
def test_a_filter_by_any_config_value(empty, sweep, words, found):
    assert shown_ids(empty, words) == [f"r-{n:04d}" for n in found]


def test_config_values_have_the_paths_of_set():
    spec = {"a": {"b": [1, {"c": 2}]}, "d": [], "e": {}, "f": None}
    assert list_config_values(spec) == [
        ("a.b.0", 1), ("a.b.1.c", 2), ("d", []), ("e", {}), ("f", None),
    ]  # fmt: skip


# Notes and tags ----------------------------------------------------------------------------------


def secret(client, run):
    page = client.page(f"/runs/{run}")
    named = [(n, v) for t, n, v in page.attributes if t == "input" and n in ("name", "value")]
    return next(v for (_, name), (_, v) in pairwise(named) if name == "write")


def test_a_note_and_tags_are_written_with_the_secret_alone(empty, registry):
    run = submit(registry)
    sent = {"note": "as <b>expected</b>\r\n\u202e", "tags": "paper, baseline paper"}
    assert empty.post(f"/runs/{run}/note", data=sent).status_code == 403
    assert empty.post(f"/runs/{run}/note", data={**sent, "write": "no"}).status_code == 403
    assert registry.notes.read_all() == {}
    whole = {**sent, "write": secret(empty, run)}
    done = empty.post(f"/runs/{run}/note", data=whole)
    assert (done.status_code, done.headers["location"]) == (303, f"/runs/{run}")
    note = registry.notes.read(run)
    assert (note.note, note.tags) == ("as <b>expected</b>\n⟨U+202E⟩", ("paper", "baseline"))
    page = empty.page(f"/runs/{run}")
    assert page.text.count("as <b>expected</b>") == 2, "on the page, and in the form"
    assert "b" not in page.tags or page.tags.count("b") == empty.get("/runs/1").text.count("<b>")
    assert empty.post("/runs/r-0999/note", data=whole).status_code == 404
    assert empty.get(f"/runs/{run}/note").status_code == 405


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"note": "漢" * 4000, "tags": ""}, 303),
        ({"note": "x" * 4001}, 422),
        ({"tags": " ".join(map(str, range(21)))}, 422),
        ({"tags": "x" * 41}, 422),
        ({"note": "x" * 70_000}, 413),
    ],
)
def test_notes_have_limits(empty, registry, sent, status):
    run = submit(registry)
    whole = {**sent, "write": secret(empty, run)}
    assert empty.post(f"/runs/{run}/note", data=whole).status_code == status
    assert (registry.notes.read_all() != {}) == (status == 303)


def test_runs_are_found_by_their_tags_and_notes(empty, registry):
    first, second = submit(registry), submit(registry, 1)
    registry.notes.write(first, "diverged early", ["Paper"])
    assert shown_ids(empty, "tag:paper") == shown_ids(empty, "diverged") == [first]
    assert shown_ids(empty, "tag:pap") == []
    assert shown_ids(empty, "rlcr") == [second, first]
    page = empty.page("/")
    assert "/?q=tag%3APaper" in page.values("href") and "diverged early" in page.text
