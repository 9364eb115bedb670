"""The learner on two ranks under every ZeRO stage, against plain PyTorch and peft."""

import pytest
import torch
from learner_figures import ON_GPU, judge_stage, measure_learner

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Figures by ZeRO stage."""
    if ON_GPU and torch.cuda.device_count() < 2:
        pytest.skip("2 ranks need as many GPUs")
    return measure_learner(2, STAGES, tmp_path_factory.mktemp("learner"))


@pytest.mark.timeout(900)  # the first waits for all figures
@pytest.mark.parametrize("stage", STAGES)
def test_every_figure_is_that_of_plain_learning(measured, stage):
    judge_stage(measured[str(stage)], 2, stage)
