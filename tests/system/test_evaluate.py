"""`rlx eval`: sets near and far, answered once, gone on with, recorded and drawn."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx_plugins.rlcr import parse_confidence

SUITE = """
name: shifted
problems: 70
samples: 2
sets:
  near: {distribution: in}
  three: {set: {task.numbers: [3]}, problems: 20}
"""


SEVERAL = {"evaluation.every": 2, "runner.checkpoint.every": 2}
"""An evaluation and a checkpoint half-way."""


@pytest.fixture(scope="module")
def own_finished(own_home):
    """A run of four steps with two checkpoints, to whose records this module adds."""
    record = own_home.run(own_home.submit(sets={**own_home.small, **SEVERAL}))
    return SimpleNamespace(id=record.id, record=record, root=Path(record.directory))


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
    own_home.until(lambda: list(kept.glob("*/*.json")), "a batch to be answered")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    first = {path: path.stat().st_mtime_ns for path in kept.glob("*/*.json")}
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
    sizes = sorted(p.name for p in (own_finished.root / "evaluations").glob("*/*.json"))
    assert sizes == ["000000_020.json", "000000_064.json", "000064_006.json"]


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
        for one in own:
            texts = zip(one["confidences"], one["confidence_texts"], strict=True)
            # One whose form is wrong counts as unreadable.
            assert all(c is None or parse_confidence(text).value == c for c, text in texts)
        assert found["scaling"]["k"] == [1, 2]
        low, high = found["intervals"]["brier"]
        assert low <= found["brier"] <= high
    assert {a["stratum"] for a in answers if a["set"] == "three"} == {"3 numbers"}
    assert told["sets"]["near"]["distribution"] == "in"


def test_it_is_recorded_for_the_run(own_home, own_finished, evaluated):
    told, said, _ = evaluated
    assert f"recorded for {own_finished.id} after step 4" in said
    with own_home.registry() as registry:
        found = {e.suite: e for e in registry.results.evaluations(own_finished.id, "suite/")}
        pictures = {Path(a.path).name for a in registry.results.artifacts(own_finished.id)}
        curves = registry.results.metrics(own_finished.id, ["eval/suite/shifted/near/brier"])
    assert set(found) == {"suite/shifted/near", "suite/shifted/three"}
    near = found["suite/shifted/near"]
    assert (near.step, near.label, near.n) == (4, "after", 140)
    assert near.metrics["brier"] == told["sets"]["near"]["brier"]
    assert len(near.payload["confidence"]) == 140
    assert near.payload["suite"]["samples"] == 2
    assert {"reliability.png", "risk_coverage.svg", "scaling.png", "confidence.png"} <= pictures
    assert curves


def test_a_model_by_its_name_on_the_hub(own_home, own_finished, suite, evaluated, tmp_path):
    told, _, _ = evaluated
    commit = "0" * 40
    cached = tmp_path / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / commit).symlink_to(own_finished.root / "model")
    spec = own_home.folder / "hub.yaml"
    spec.write_text(json.dumps(own_finished.record.spec))
    own_home.environment |= {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = own_home.rlx("eval", "org/tiny", "--spec", spec, "--suite", suite, "--json")
    assert done.returncode == 0, done.stderr
    hub = json.loads(done.stdout)
    assert (hub["run"], hub["model"]) == (None, "org/tiny")
    assert hub["sets"] == told["sets"]


def test_a_checkpoint_is_an_evaluation_of_its_step(own_home, own_finished, suite, evaluated):
    told, _, _ = evaluated
    ask = ("eval", own_finished.id, "--suite", suite, "--json", "--at", 2)
    half = own_home.rlx(*ask)
    assert half.returncode == 0, half.stderr
    assert json.loads(half.stdout)["step"] == 2
    assert json.loads(half.stdout)["sets"] != told["sets"]
    assert f"recorded for {own_finished.id} after step 2" in half.stderr
    with own_home.registry() as registry:
        found = registry.results.evaluations(own_finished.id, "suite/shifted/near")
        pictures = {a.path for a in registry.results.artifacts(own_finished.id)}
    assert [(e.step, e.label) for e in found] == [(2, "step"), (4, "after")]
    drawn = "pictures/suite-shifted-step-2/reliability"
    assert pictures >= {f"{drawn}.{kind}" for kind in ("png", "svg")}
    assert not list(own_finished.root.glob(".rlx-eval-*"))
