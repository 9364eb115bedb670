"""`rlx eval --with`: other tools evaluate a run's model over the interface that serves it."""

import json
from pathlib import Path

import pytest

import rlx

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(scope="module", autouse=True)
def _tools(own_home):
    own_home.add_path(TOOLS)


def test_log_likelihoods_are_recorded(own_home, own_finished):
    done = own_home.rlx(
        *("eval", own_finished.id, "--with", "lm_eval:sums", "--problems", "7", "--json")
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["tasks"]["sums"]
    assert figures["n"] == 7 and figures["acc"] == figures["accuracy"] in (0, 1)
    assert figures["likely"] < 0
    assert "what it prints is no result" in done.stderr
    with own_home.registry() as registry:
        (kept,) = registry.results.evaluations(own_finished.id, "lm_eval/sums")
    assert (kept.label, kept.step, kept.n) == ("after", 4, 7) and kept.metrics == figures
    shown = own_home.rlx("status", own_finished.id)
    assert shown.returncode == 0 and "lm_eval/sums: accuracy" in shown.stdout


def test_figures_of_calibration_are_those_of_rlx(own_home, own_finished, monkeypatch):
    """The metric that Inspect computes, on the answers of the run's own evaluation."""
    monkeypatch.setenv("RLX_HOME", str(own_home.path))
    run = rlx.open_run(own_finished.id)
    answers = run.answers().astype(object).where(lambda found: found.notna(), None)
    pairs = [*zip(answers.problem_ids, answers.correct, answers.confidence, strict=True)]
    (own_home.folder / "answers.json").write_text(json.dumps(pairs))
    done = own_home.rlx("eval", own_finished.id, "--with", "inspect:answers.json", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tasks"]["answers"]
    own = run.evaluations().query("suite == 'held_out' and label == 'after'").iloc[0]
    for name in ("n", "brier", "ece_debiased", "readable_share", "mean_confidence"):
        assert found[name] == pytest.approx(own[name], abs=1e-9), name


def test_what_is_not_there_is_named(own_home, own_finished):
    wrong = own_home.rlx("eval", own_finished.id, "--with", "lm-eval:sums")
    assert wrong.returncode == 2 and "write lm_eval:TASK or inspect:FILE" in wrong.stderr
    for none in ("inspect:none.json", "lm_eval:none.yaml"):
        lost = own_home.rlx("eval", own_finished.id, "--with", none)
        assert lost.returncode == 2 and f"there is no file {none.partition(':')[2]}" in lost.stderr
    (own_home.folder / "broken.json").write_text("{")
    failed = own_home.rlx("eval", own_finished.id, "--with", "inspect:broken.json")
    assert failed.returncode == 4 and "inspect ended with exit code 1" in failed.stderr
    own_home.environment["PYTHONPATH"] = ""
    away = own_home.rlx("eval", own_finished.id, "--with", "lm_eval:sums")
    assert away.returncode == 4 and "pip install 'lm_eval[api]' transformers" in away.stderr
