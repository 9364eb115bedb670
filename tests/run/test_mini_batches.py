"""Runs whose steps are split: one optimizer step per part, and the same numbers every time."""

from pathlib import Path

import pytest


@pytest.fixture
def learn(own_home):
    """The final weights and the curves of a run of one step."""

    def submit(**sets):
        small = {**own_home.small, "phases.0.steps": 1, "runner.checkpoint.every": 1}
        record = own_home.submit(own_home.yaml, {**small, **sets})
        assert record.status == "finished"
        weights = (Path(record.directory) / "model" / "model.safetensors").read_bytes()
        return weights, own_home.metrics(record.id)

    return submit


def test_a_step_in_parts_learns_otherwise_and_repeatably(learn):
    whole, before = learn()
    parts, after = learn(**{"optimizer.mini_batches": 2})
    again, repeated = learn(**{"optimizer.mini_batches": 2})
    assert parts == again != whole
    figures = ["rewards/accuracy/mean", "train/grad_norm", "train/ratio_max"]
    assert {f: after[f] for f in figures} == {f: repeated[f] for f in figures}
    assert before["rewards/accuracy/mean"] == after["rewards/accuracy/mean"], "the same rollouts"
    assert dict(before["train/ratio_max"])[1] == pytest.approx(1.0, abs=1e-4)
    assert dict(after["train/ratio_max"])[1] > 1.001, "the second part sees a moved policy"
