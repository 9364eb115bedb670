"""The shelf: its experiments are valid, and its page says what is stored."""

import sys
from pathlib import Path

import pytest

from rlx.checks import check_file

ROOT = Path(__file__).parents[2]
SHELF = ROOT / "experiments" / "shelf"


@pytest.fixture(scope="module")
def shelf():
    there = [str(SHELF), str(ROOT / "docs" / "make")]
    sys.path[:0] = there
    import shelf
    import shelf_page
    import ways

    yield shelf, shelf_page, ways
    for path in there:
        sys.path.remove(path)


@pytest.mark.parametrize("path", sorted(SHELF.glob("*_*.yaml")), ids=lambda path: path.stem)
def test_every_way_is_an_experiment_of_its_own_name(path):
    read, _ = check_file(path)
    assert read.spec.name == path.stem.replace("_", "-")


def test_every_way_has_an_urn_and_every_file_a_way(shelf):
    _, _, ways = shelf
    assert all(way.find_spec("urn") for way in ways.WAYS)
    named = {way.find_spec(task) for way in ways.WAYS for task in ways.TASKS}
    files = {f"experiments/shelf/{path.name}" for path in SHELF.glob("*_*.yaml")}
    assert files - named == {"experiments/shelf/urn_three.yaml"}


def test_results_are_of_today_s_experiments_and_the_page_shows_them(shelf, tmp_path, monkeypatch):
    programs, page, ways = shelf
    results = {(t, w.name): programs.read_results(w, t) for t in ways.TASKS for w in ways.WAYS}
    assert any(results.values())
    for (task, name), runs in results.items():
        (way,) = (way for way in ways.WAYS if way.name == name)
        for result in runs.values():
            spec, overrides = ROOT / way.find_spec(task), ways.SETS.get(task, ())
            assert result["digest"] == programs.compute_digest(spec, overrides)
    monkeypatch.setattr(page, "PAGE", tmp_path / "shelf.md")
    monkeypatch.setattr(page, "draw_curves", lambda *_: None)
    page.write_page(results)
    assert (tmp_path / "shelf.md").read_text() == (ROOT / "docs" / "shelf.md").read_text()


def test_figures_on_the_urn_are_measured_against_the_truth(shelf):
    _, page, _ = shelf
    answers = {"strata": ["0 of 10 red", "5 of 10 red", "10 of 10 red"], "stated": [0.0, None, 0.9]}
    after = {"n": 3, "unparsable": 1, "brier": 0.2}
    found = page.compute_figures("urn", {"after": after, "answers": answers, "cpu_seconds": 9})
    assert found["distance"] == pytest.approx(0.05) and found["slope"] == pytest.approx(0.9)
    assert found["edge"] == 0.5 and found["unparsable"] == pytest.approx(1 / 3)
