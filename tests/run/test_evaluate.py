"""`rlx eval`: sets near and far, answered once, gone on with, recorded and drawn."""

import json
import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

SUITE = """
name: shifted
problems: 70
samples: 2
sets:
  near: {distribution: in}
  three: {set: {task.numbers: [3]}, problems: 20}
"""


@pytest.fixture(scope="module")
def suite(own_home):
    path = own_home.folder / "suite.yaml"
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="module")
def evaluated(own_home, own_finished, suite):
    """The first time, killed once it has answered something."""
    process = own_home.begin("eval", own_finished.id, "--suite", suite, "--json")
    kept = own_finished.root / "evaluations"
    own_home.until(lambda: list(kept.glob("*/*.json.gz")), "a batch to be answered")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    first = {path: path.stat().st_mtime_ns for path in kept.glob("*/*.json.gz")}
    done = own_home.rlx(
        "eval", own_finished.id, "--suite", suite, "--json", "--out", "answers.jsonl"
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr, first


def test_it_goes_on_where_it_was_stopped(own_finished, evaluated):
    _, _, first = evaluated
    assert first
    for path, written in first.items():
        assert path.stat().st_mtime_ns == written, "answered before"
    sizes = sorted(p.name for p in (own_finished.root / "evaluations").glob("*/*.json.gz"))
    assert sizes == ["000000_020.json.gz", "000000_064.json.gz", "000064_006.json.gz"]


def test_figures_are_of_every_answer(own_home, evaluated):
    told, _, _ = evaluated
    answers = [
        json.loads(line) for line in (own_home.folder / "answers.jsonl").read_text().splitlines()
    ]
    for name, problems in (("near", 70), ("three", 20)):
        own = [a for a in answers if a["set"] == name]
        found = told["sets"][name]
        assert found["problems"] == problems == len({a["problem"] for a in own})
        assert found["n"] == 2 * problems == len(own)
        assert found["accuracy"] == pytest.approx(sum(a["correct"] for a in own) / len(own))
        assert {len(a["confidences"]) for a in own} == {4}, "as many as the experiment asks for"
        assert found["scaling"]["k"] == [1, 2]
        low, high = found["intervals"]["brier"]
        assert low <= found["brier"] <= high
    assert {a["stratum"] for a in answers if a["set"] == "three"} == {"3 numbers"}
    assert told["sets"]["near"]["distribution"] == "in"


def test_it_is_recorded_for_the_run(own_home, own_finished, evaluated):
    told, said, _ = evaluated
    assert f"recorded for {own_finished.id} after step 4" in said
    with own_home.registry() as registry:
        found = {e.suite: e for e in registry.evaluations(own_finished.id, "suite/")}
        pictures = {Path(a.path).name for a in registry.artifacts(own_finished.id)}
        curves = registry.metrics(own_finished.id, ["eval/suite/shifted/near/brier"])
    assert set(found) == {"suite/shifted/near", "suite/shifted/three"}
    near = found["suite/shifted/near"]
    assert (near.step, near.label, near.n) == (4, "after", 140)
    assert near.metrics["brier"] == told["sets"]["near"]["brier"]
    assert len(near.payload["confidence"]) == 140
    assert near.payload["suite"]["samples"] == 2
    assert {"reliability.png", "risk_coverage.svg", "scaling.png", "confidence.png"} <= pictures
    assert curves


def test_a_model_without_its_run_gives_the_same(own_home, own_finished, suite, evaluated):
    told, _, _ = evaluated
    spec = own_home.folder / "alone.yaml"
    spec.write_text(json.dumps(own_finished.record.spec))
    done = own_home.rlx(
        "eval", own_finished.root / "model", "--spec", spec, "--suite", suite, "--json",
        "--pictures", "drawn",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone = json.loads(done.stdout)
    assert alone["run"] is None
    assert alone["sets"] == told["sets"]
    assert (own_home.folder / "drawn" / "reliability.svg").exists()


def test_the_experiments_own_sets_and_a_table(own_home, own_finished):
    done = own_home.rlx("eval", own_finished.id, "--problems", 8, "--greedy", "--no-record")
    assert done.returncode == 0, done.stderr
    assert "suite own, seed 0: one answer to every problem, the most likely tokens" in done.stdout
    assert "held_out" in done.stdout
    assert "ECE, equal mass" in done.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: x\nsets: {a: {set: {task.nmbers: [3]}}}\n", "set 'a' of the suite"),
        ("name: x\nsets: {a: {set: {task.target_range: [100, 180]}}}\n", "has no token"),
        ("name: x\nsamples: 0\nsets: {a: {}}\n", "'samples' must be at least 1"),
        ("name: x\nset: {a: {}}\n", "unknown key 'set'"),
        ("name: x\nsets: {}\n", "sets"),
    ],
)
def test_a_suite_that_cannot_be_is_refused(own_home, own_finished, tmp_path, text, says):
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    done = own_home.rlx("eval", own_finished.id, "--suite", path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_trained_is_what_is_evaluated(own_home, own_finished):
    done = own_home.rlx("eval", own_finished.id, "--set", "rewards.turn.accuracy.weight=2")
    assert done.returncode == 2
    assert "only runner, sampler may be changed here" in done.stderr
