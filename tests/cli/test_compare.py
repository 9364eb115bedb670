"""`rlx compare`: recipes by their digests, over seeds, in every form the same cells."""

import csv
import io
import json
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.spec.reader import read_spec
from rlx_registry import Registry

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"
BRIER = {0: (0.12, 0.18), 1: (0.18, 0.25), 2: (0.15, 0.2)}


def finished(registry, seed, brier, *overrides, status="finished", name="rlcr"):
    spec = read_spec(RLCR, (f"seed={seed}", f"name={name}", *overrides)).spec
    run, _ = registry.submit(
        digest=spec.digest,
        seed=seed,
        name=name,
        spec=spec.resolved(),
        yaml="",
        plugins=[],
        code={},
        environment={},
        again=True,
    )
    registry.start(run.id, ["submitted"])
    for label, value in (("before", 0.35), ("after", brier)):
        metrics = {"accuracy": 0.6, "brier": value, "ece": None}
        registry.add_evaluation(run.id, 9, label, "held_out", 600, metrics)
    registry.add_evaluation(run.id, 9, "after", "probe/early_answering", 3, {"accuracy": 0.1})
    registry.transition(run.id, ["running"], status)
    return run.id


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two recipes over three seeds, one seed of the first twice, and a run that was stopped."""
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    other = ("estimator.confidence.normalize=std", 'rollout.confidence.template="su|re?"')
    with Registry.open(f"sqlite:///{tmp_path}/home/registry.db") as registry:
        stale = finished(registry, 0, 0.9)
        first = [finished(registry, seed, a) for seed, (a, _) in BRIER.items()]
        second = [
            finished(registry, seed, b, *other, name="sigma") for seed, (_, b) in BRIER.items()
        ]
        stopped = finished(registry, 9, 0.5, status="stopped")
    return stale, first, second, stopped


def told(capsys, *arguments):
    capsys.readouterr()
    assert main(["compare", *arguments]) == 0
    return capsys.readouterr().out


def test_recipes_are_told_apart_by_their_digests(runs, capsys):
    stale, first, second, stopped = runs
    found = json.loads(told(capsys, stale, *first, *second, stopped, "--json"))
    assert [r["label"] for r in found["recipes"]] == ["A", "B"]
    assert found["recipes"][0]["runs"] == {str(s): run for s, run in enumerate(first)}, "the newest"
    assert found["spec"] == {
        "estimator.confidence.normalize": ["center", "std"],
        "rollout.confidence.template": ["sure?\n", "su|re?"],
    }
    assert found["left_out"] == [stopped]
    figures = {row["metric"]: row for row in found["figures"]}
    assert {row["suite"] for row in found["figures"]} == {"held_out"}
    assert set(figures) == {"accuracy", "brier"}
    brier = figures["brier"]
    assert [m["mean"] for m in brier["means"]] == pytest.approx([0.15, 0.21])
    none, gap = brier["differences"]
    assert none is None
    assert gap["over"]["mean"] == pytest.approx(0.06)
    assert gap["p"] == 0.25, "three seeds can say no more"
    assert figures["accuracy"]["differences"][1]["p"] == 1


def test_a_name_is_all_of_its_runs(runs, capsys):
    stale, first, second, _ = runs
    by_name = json.loads(told(capsys, "rlcr", "sigma", "--json"))
    one_by_one = json.loads(told(capsys, stale, *first, *second, "--json"))
    assert by_name["figures"] == one_by_one["figures"]


def test_every_form_has_the_same_cells(runs, capsys, tmp_path):
    _, first, second, _ = runs
    names = [*first, *second]
    text, md = told(capsys, *names), told(capsys, *names, "--md")
    assert main(["compare", *names, "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    for form in (text, md, page):
        for cell in ("What they differ in", "center", "+0.060 ± 0.025 (p 0.25)", "0.150 ± 0.075"):
            assert cell in form
    assert "| A | rlcr |" in md
    assert "su\\|re?" in md, "a bar ends no cell"
    lines = list(csv.DictReader(io.StringIO(told(capsys, *names, "--csv"))))
    (line,) = [r for r in lines if r["metric"] == "brier" and r["recipe"] == "B"]
    assert float(line["difference"]) == pytest.approx(0.06)
    assert float(line["p"]) == 0.25


def test_one_run_alone(runs, capsys):
    _, first, _, _ = runs
    text = told(capsys, first[1])
    assert "0.180" in text
    assert "differ" not in text


def test_what_cannot_be_compared(runs, capsys, tmp_path):
    _, first, _, stopped = runs
    assert main(["compare", stopped]) == 2
    assert "nothing to compare yet" in capsys.readouterr().err
    assert main(["compare", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
    assert main(["compare", first[0], "--html", str(tmp_path)]) == 4
    assert "cannot write" in capsys.readouterr().err
