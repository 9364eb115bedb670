"""A run whose loss sums over the values of a confidence: recorded, checked and rescored as any."""

from pathlib import Path

import pytest

URN = Path(__file__).parents[2] / "experiments" / "urn.yaml"
SMALL = {
    "rollout.prompts_per_step": 8,
    "phases.0.steps": 2,
    "evaluation.problems": 40,
    "runner.micro_batch_tokens": 64,
    "loss.entropy": "{coefficient: 0.01, span: confidence, schedule: learning_rate}",
}


@pytest.fixture(scope="module")
def run(own_home):
    return own_home.submit(URN, SMALL).id


def test_the_expected_score_and_the_mass_of_the_values_are_curves(own_home, run):
    curves = own_home.metrics(run)
    for (_, score), (_, mass) in zip(
        curves["train/expected_score"], curves["train/stated_mass"], strict=True
    ):
        assert 0 < score < mass <= 1
    assert 0 <= dict(curves["rewards/_distance/mean"])[2] <= 1


def test_the_record_holds_and_rescoring_changes_nothing(own_home, run):
    own_home.check_record(run)


def test_the_status_names_what_flatters_no_figure(own_home, run):
    after = own_home.json("status", run)["evaluation"]["after"]
    assert after["problems"] == after["n"] == 40
    assert after["ece_debiased"] <= after["ece"]
    assert {"brier_recalibrated", "auroc_one_bit"} <= after.keys()
    assert 0 <= after["rewards"]["_distance"] <= 1
