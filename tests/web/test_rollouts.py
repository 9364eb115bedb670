"""The rollouts of a step: trees, what they were given, filters, two steps side by side."""

import os
import shutil

import pytest
from pages import dashboard
from shown import SILENT, shown

from rlx_registry import Registry

STEP = "/runs/r-0001/rollouts/3"


def shape(rows):
    return [(row["row"], shape(row["below"])) for row in rows]


def by_row(data):
    def walk(rows):
        for row in rows:
            yield row["row"], row
            yield from walk(row["below"])

    return {number: row for tree in data["trees"] for number, row in walk(tree["rows"])}


def test_a_tree_is_what_was_sampled(plain, known):
    data = plain.twin(STEP)
    assert shape(data["trees"][0]["rows"]) == [(0, [(2, []), (3, [])]), (1, [(4, []), (5, [])])]
    assert shape(data["trees"][1]["rows"]) == [(6, [])]
    for index in known.results.rollout_index("1", 3)[:8]:
        row = by_row(data)[index.row]
        for field in (
            "reward",
            "advantage",
            "n_tokens",
            "finish_reason",
            "failed",
            "turn",
            "group",
        ):
            assert row[field] == getattr(index, field), field
    page = plain.page(STEP)
    order = [v for v in page.values("id") if v.startswith("row-3-")]
    assert order == [f"row-3-{n}" for n in (0, 2, 3, 1, 4, 5, 6, 7, 8)]
    text = page.cells()
    for said in ("<1>plain", "first plain", "second plain", "0.7 plain", "asked <1>plain"):
        assert said in text, said  # prompts as the model read them, token by token


def test_rewards_by_component_and_why_one_failed(plain):
    rows = by_row(plain.twin(STEP))
    parts = {e["name"]: e for e in rows[0]["entries"]}
    assert (parts["right plain"]["raw"], parts["right plain"]["part"]) == (1.0, 2.0)
    assert parts["_logged plain"]["counts"] is False
    assert [e["name"] for e in rows[6]["entries"]] == ["short", "whole plain"], "turns, then whole"
    assert rows[3]["entries"][0]["status"] == "absent"
    assert rows[3]["failed"] == "brier plain: broken plain"
    text = plain.page(STEP).cells()
    for said in ("right plain 1 × 2", "right plain 0 × 2 wrong plain", "brier plain absent"):
        assert said in text, said


def test_a_group_without_signal_says_so(plain):
    groups = {g["group"]: g for t in plain.twin(STEP)["trees"] for g in t["groups"]}
    assert [g for g in groups if not groups[g]["signal"]] == [SILENT + 1]
    assert groups[2]["rewards"] == [0.75, 0.75]
    assert plain.page(STEP).cells().count("no signal") == 1


FILTERS = {
    "": [0, 1, 2, 3, 4, 5],
    "low=2": [0],
    "high=0": [1],
    "low=99": [],
    "turn=query": [],
    "turn=kind plain": [0],
    "failed=1": [0, 1],
    "no_signal=1": [0],
    "text=FIRST": [0],
    "problem=p1 plain": [1],
    "low=&high=&turn=&failed=0&text=&problem=": [0, 1, 2, 3, 4, 5],
}
"""The trees that each filter leaves, of which four are on the first page."""


def test_filters(plain):
    found = {}
    for query in FILTERS:
        data, page = plain.get(f"{STEP}.json?{query}").json(), plain.page(f"{STEP}?{query}")
        assert f"{data['matching']} prompts" in page.text, query
        assert page.values("class").count("card tree") == len(data["trees"]), query
        none = "No prompt of this step matches." in page.text
        assert set(page.values("name")) >= {"low", "high", "turn", "failed", "no_signal", "text"}
        found[query] = data["matching"], [t["tree"] for t in data["trees"]], none
    assert found == {q: (len(trees), trees[:4], not trees) for q, trees in FILTERS.items()}
    for query in ("low=-1e400", "low=nan", "low=x"):
        refused = plain.get(f"{STEP}.json?{query}")
        assert (refused.status_code, refused.json()["error"]["status"]) == (422, 422), query


def test_prompts_come_by_the_screenful_and_keep_their_filter(plain):
    first, last = plain.twin(STEP), plain.twin(f"{STEP}?page=2")
    assert (first["pages"], len(first["trees"]), len(last["trees"])) == (2, 4, 2)
    assert {t["tree"] for t in first["trees"] + last["trees"]} == set(range(6))
    assert last["trees"][-1]["role"] == "greedy"
    page = plain.page(f"{STEP}?low=-5&text=a")
    links = [v for tag, n, v in page.attributes if tag == "a" and n == "href"]
    (before,) = [v for v in links if v.startswith("/runs/r-0001/rollouts/2?")]
    assert "low=-5.0&" in before and "&text=a&" in before
    assert any("page=2" in v for v in plain.page(STEP).values("href"))


def test_steps_one_after_the_other(plain):
    for step, previous, following in ((1, None, 2), (2, 1, 3), (3, 2, None)):
        data = plain.twin(f"/runs/r-0001/rollouts/{step}")
        assert (data["previous"], data["next"]) == (previous, following)
        assert data["steps"] == {"first": 1, "last": 3, "count": 3}
    for asked, given in (("", 3), ("?step=0", 1), ("?step=2", 2), ("?step=999", 3)):
        response = plain.get(f"/runs/1/rollouts{asked}")
        assert (response.status_code, response.headers["location"]) == (
            303,
            f"/runs/r-0001/rollouts/{given}",
        )


@pytest.fixture
def own(tmp_path):
    """A registry whose bodies a test may spoil."""
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        shown(registry, tmp_path)
    return dashboard(
        f"sqlite:///{tmp_path}/registry.db"
    ), tmp_path / "runs/r-0001/rollouts/3.parquet"


PIPE = "cannot read body 3.parquet: not a regular file"


SPOILT = [
    (lambda path: None, "cannot read body 3.parquet: No such file or directory"),
    (lambda path: path.write_bytes(b"PAR1"), "body 3.parquet was recorded as"),
    (os.mkfifo, PIPE),
    (lambda path: path.symlink_to("/dev/zero"), PIPE),
    (lambda path: shutil.rmtree(path.parent), "cannot read body 3.parquet"),
]
"""What is put in the place of a body that is gone, and what is said of it."""


def test_without_its_body_a_step_is_shown_by_its_previews(own):
    client, path = own
    path.unlink()
    for spoil, why in SPOILT:
        spoil(path)
        data = client.twin(STEP)
        assert why in data["missing"]
        assert shape(data["trees"][0]["rows"]) == [(0, [(2, []), (3, [])]), (1, [(4, []), (5, [])])]
        assert data["trees"][0]["prompt"] is None and by_row(data)[0]["said"] == []
        text = client.page(STEP).cells()
        assert f"Only previews: {why}" in text
        assert "first plain" in text and "right plain 1" in text
        refused = client.get(f"{STEP}/0.json")
        assert refused.status_code == 404 and why in refused.json()["error"]["message"]
        path.unlink(missing_ok=True)
