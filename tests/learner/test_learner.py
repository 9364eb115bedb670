"""The learner on one rank, unsharded and with everything sharded, against plain PyTorch and peft.

All stages, on two ranks, are in tests/system/learner.
"""

import pytest
from learner_figures import judge_stage, measure_learner
from rows import each_row

from rlx.learner import learning_rate
from rlx.spec import OptimizerSpec

STAGES = (0, 3)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Figures by ZeRO stage."""
    return measure_learner(1, STAGES, tmp_path_factory.mktemp("learner"))


@pytest.mark.timeout(900)  # the first waits for all figures
@pytest.mark.parametrize("stage", STAGES)
def test_every_figure_is_that_of_plain_learning(measured, stage):
    judge_stage(measured[str(stage)], 1, stage)


# Learning rates ----------------------------------------------------------------------------------


def rates(steps=5, **options):
    spec = OptimizerSpec(learning_rate=2.0, **options)
    return [learning_rate(spec, step, steps) for step in range(steps)]


def test_a_constant_schedule():
    assert rates() == [2, 2, 2, 2, 2]
    assert rates(warmup_steps=2) == [1, 2, 2, 2, 2]


def test_a_linear_schedule():
    assert rates(schedule="linear") == pytest.approx([2, 1.6, 1.2, 0.8, 0.4])
    assert rates(schedule="linear", final_fraction=0.5) == pytest.approx([2, 1.8, 1.6, 1.4, 1.2])


def test_a_cosine_schedule():
    half = 0.5**0.5
    expected = [2, 1 + half, 1, 1 - half]
    assert rates(steps=4, schedule="cosine") == pytest.approx(expected)


@each_row("schedule", ["linear", "cosine"])
def test_warm_up_comes_first_and_the_fall_begins_at_the_peak(schedule):
    found = rates(steps=8, schedule=schedule, warmup_steps=4)
    assert found[:5] == [0.5, 1, 1.5, 2, 2]
    assert found[4:] == sorted(found[4:], reverse=True)
    assert 0 < found[-1] < 1
