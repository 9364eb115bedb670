"""What a finished run leaves behind: metrics, rollouts and a model."""

import pytest
import torch

from rlx.credit import group_advantages

STEPS = [1, 2, 3, 4]
ANSWERS, CONFIDENCES = 4, 4


def test_every_step_has_its_metrics(finished, home):
    series = home.metrics(finished.id)
    for name in (
        "rewards/accuracy/mean",
        "rewards/format/mean",
        "train/reward_answer",
        "rollout/len_answer",
        "perf/step_s",
        "health/skipped_update",
        "health/scorer_faults",
    ):
        assert [step for step, _ in series[name]] == STEPS
    for name in ("rewards/brier/mean", "calibration/brier", "rollout/len_confidence"):
        assert [step for step, _ in series[name]] == STEPS[2:]
    assert [step for step, _ in series["eval/held_out/accuracy"]] == [0, 4]
    for part in ("sample", "score", "learn", "record", "rest"):
        assert [step for step, _ in series[f"perf/cpu_{part}_s"]] == STEPS
    assert [step for step, _ in series["perf/cpu_evaluate_s"]] == [0, 4]
    skipped = dict(series["health/skipped_update"])
    updated = [step for step in STEPS if not skipped[step]]
    assert updated, "no step had a signal: these tests would show nothing"
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/entropy"):
        assert [step for step, _ in series[name]] == updated
    assert sum(value for _, value in series["health/scorer_faults"]) == 0


def test_every_rollout_is_kept(finished):
    steps = []
    for step, trees, index in finished.bodies():
        steps.append(step)
        kinds = [s["kind"] for tree in trees for s in tree["segments"] if s["author"] == "policy"]
        assert len(trees) == 4
        assert kinds.count("answer") == 4 * (8 if step <= 2 else ANSWERS)
        assert kinds.count("confidence") == (0 if step <= 2 else 4 * ANSWERS * CONFIDENCES)
        rows = [row for tree in trees for row in tree["rows"]]
        assert sorted(row["row"] for row in rows) == [item.row for item in index]
        assert len(rows) == len(kinds)
    assert steps == STEPS


def test_advantages_follow_from_the_stored_rewards(finished):
    """Bit for bit, from what is in the file alone."""
    signals = 0
    options = finished.record.spec["estimator"]
    for _, trees, index in finished.bodies():
        rows = sorted(
            ((row, tree) for tree in trees for row in tree["rows"]), key=lambda pair: pair[0]["row"]
        )
        totals = [
            sum(
                r["weight"] * r["raw"]
                for r in tree["segments"][row["segment"]]["rewards"]
                if not r["name"].startswith("_")
            )
            for row, tree in rows
        ]
        assert [item.reward for item in index] == pytest.approx(totals)
        groups = torch.tensor([row["group"] for row, _ in rows])
        scores = torch.tensor(totals, dtype=torch.float32)
        answers = group_advantages(scores, groups, normalize="std", ddof=1, eps=1e-6)
        answers = options.get("lambda_ans", 1.0) * answers
        confidences = group_advantages(scores, groups, normalize="center")
        confidences = options["lambda_conf"] * confidences
        for place, (row, _) in enumerate(rows):
            expected = (answers if row["kind"] == "answer" else confidences)[place].item()
            learned = [
                a for a, learns in zip(row["advantages"], row["mask"], strict=True) if learns
            ]
            assert set(learned) == {expected}
            signals += expected != 0
    assert signals > 20


def test_the_exported_model_is_the_one_that_was_trained(finished):
    from rlx.model import build_policy
    from rlx.spec import PretrainedModelSpec

    exported = build_policy(PretrainedModelSpec(path=str(finished.root / "model")), 0)
    start = build_policy(PretrainedModelSpec(path=str(finished.warm_start)), 0)
    assert exported.dialogue.open("nums: 3 4\n") == start.dialogue.open("nums: 3 4\n")
    pairs = zip(exported.model.parameters(), start.model.parameters(), strict=True)
    moved = [float((a - b).detach().abs().max()) for a, b in pairs]
    assert 0 < max(moved) < 0.1
