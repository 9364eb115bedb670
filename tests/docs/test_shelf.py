"""The shelf: its experiments are valid, and its page says what is stored."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rlx.checks import check_file
from rlx.evaluation import ScoredAnswer, compute_brier

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


@pytest.fixture(scope="module")
def rules(shelf):
    import rules

    return rules


def write_answers(file, said):
    """Answers as `rlx eval --out` writes them: what each says, by problem; 7 is right."""
    lines = []
    for number, own in enumerate(said):
        for sample, value in enumerate(own):
            sign = "=" if value == 7 else "!="
            answer = ScoredAnswer(
                problem=number, problem_id=f"{number}:3,4=7", stratum="2 numbers", sample=sample,
                text=f"<think>3 + 4 = {value}</think>", said=None if value is None else str(value),
                correct=int(value == 7), confidences=(float("nan") if value is None else 0.9,),
                confidence_texts=("" if value is None else f"<analysis>{value}{sign}7</analysis>",),
                rewards={}, tokens=5, truncated=False,
            )  # fmt: skip
            lines.append(json.dumps(answer.to_json()))
    file.write_text("\n".join(lines))


def test_answers_are_sampled_and_read(rules, monkeypatch):
    def evaluate(*command, quiet):
        assert command[:2] == ("eval", "r-0001-a")
        write_answers(Path(command[command.index("--out") + 1]), [[7, 7, 12], [7, None, None]])

    monkeypatch.setattr(rules, "rlx", evaluate)
    answers = rules.Answers.from_stored(rules.sample_answers("r-0001-a"))
    assert answers.correct.tolist() == [1, 1, 0, 1, 0, 0]
    assert answers.stated.tolist() == [0.9, 0.9, 0.9, 0.9, 0, 0]
    assert answers.checks.tolist() == ["=", "=", "!=", "=", "", ""]
    assert answers.reached.tolist() == [True, True, False, True, False, False]
    assert answers.agreeing.tolist() == [0.5, 0.5, 0, 0, 0.5, 0.5]


def test_what_a_rule_fits_it_fits_on_other_problems(rules):
    """Changing the labels of one half changes what is predicted for the other half alone."""
    rng = np.random.default_rng(0)
    problems = np.repeat([f"problem {n}" for n in range(60)], 2)
    half = rules.halve_problems(problems)
    answers = {
        "problems": problems, "kinds": np.where(rng.random(120) < 0.5, "a", "b"),
        "correct": (rng.random(120) < 0.5).astype(float), "stated": rng.integers(1, 10, 120) / 10,
        "checks": rng.choice(["=", "!="], 120), "reached": rng.random(120) < 0.5,
        "agreeing": rng.integers(0, 8, 120) / 7,
    }  # fmt: skip
    plain = rules.Answers(**answers)
    changed = rules.Answers(**answers | {"correct": np.where(half, 1.0, answers["correct"])})
    fitted = 0
    for rule in rules.RULES:
        before, after = rule.predict(plain), rule.predict(changed)
        assert (before[half] == after[half]).all(), rule.label
        fitted += (before[~half] != after[~half]).any()
    assert fitted == len(rules.RULES) - 2  # but the stated confidence, and the share that agrees


def test_a_fitted_temperature_finds_that_confidences_are_too_sure(rules):
    rng = np.random.default_rng(1)
    odds = rng.normal(size=4000)
    true, stated = 1 / (1 + np.exp(-odds)), 1 / (1 + np.exp(-3 * odds))
    zeros = np.zeros(4000)
    answers = rules.Answers(
        problems=np.array([str(n) for n in range(4000)]), kinds=zeros.astype(str),
        correct=(rng.random(4000) < true).astype(float), stated=stated, agreeing=zeros,
        checks=zeros.astype(str), reached=zeros > 0,
    )  # fmt: skip
    by_label = {rule.label: rule.predict(answers) for rule in rules.RULES}
    assert np.abs(by_label["stated, temperature fitted"] - true).mean() < 0.02
    own = compute_brier(answers.correct, by_label["stated, temperature fitted"])
    assert own < compute_brier(answers.correct, stated) - 0.01
