"""Distributions of other people, installed from their files into a folder, and used by a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_homes import QUIET, TINY

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "plugins" / "rlx-example"
GUESS = ROOT / "plugins" / "rlx-guess"

USED = {
    "rewards.turn.variety": "{plugin: distinct, turn: answer, weight: 0.5}",
    "rewards.turn.agreement": "{plugin: consensus, turn: confidence, weight: 0.5}",
    "estimator": "{name: leave_one_out, scale: 0.5}",
    "mask": "{strategy: one_span, span: answer}",
}
SMALL = {
    **TINY,
    **QUIET,
    "phases": "[{name: only, steps: 2}]",
    "rollout.num_generations_answer": 4,
    "rollout.num_generations_confidence": 3,
    "evaluation.problems": 6,
}


@pytest.fixture(scope="module")
def installed_into(tmp_path_factory):
    """Built and installed by pip from their files alone."""
    target = tmp_path_factory.mktemp("site")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", target)
    pip = [sys.executable, "-m", "pip", "install", *options, EXAMPLE, GUESS]
    done = subprocess.run(list(map(str, pip)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("folder", [EXAMPLE, GUESS], ids=lambda path: path.name)
def test_its_own_tests_pass(folder, installed_into, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed_into)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_a_run_uses_its_rewards_estimator_and_mask(installed_into, own):
    own.environment["PYTHONPATH"] = str(installed_into)
    run = own.run(own.submit(sets={**SMALL, **USED}))
    series = own.metrics(run.id)
    theirs = {p["name"]: p for p in run.plugins if p["distribution"] == "rlx-example"}
    assert set(theirs) == {"distinct", "consensus", "leave_one_out", "one_span"}
    assert {p["version"] for p in theirs.values()} == {"0.1.0"}
    assert theirs["distinct"]["entry_point"] == "rlx_example.rewards:Distinct"
    for name in ("variety", "agreement"):
        assert [step for step, _ in series[f"rewards/{name}/mean"]] == [1, 2]
    answers = own.json("samples", run.id, "--step", "1", "-n", "500")
    samples = [s for s in answers if s["turn"] == "answer"]
    by_tree = {}
    for sample in samples:
        by_tree.setdefault(sample["tree"], []).append(sample["rewards"]["variety"])
    assert len(by_tree) == 4
    for verdicts in by_tree.values():
        # The sum over a prompt is its number of distinct answers.
        total = sum(verdicts)
        assert total == pytest.approx(round(total))
