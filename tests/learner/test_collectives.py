"""What ranks tell each other in a step, by ZeRO stage; `tests/gpu/collectives.py` counts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.collectives import MODEL

from rlx.spec import RunnerSpec
from rlx.trial import estimate_finish_bytes, load_model_shape

ROOT = Path(__file__).parents[2]
SMALL = 16
"""Elements of norms, and of whether any gradient is infinite."""


@pytest.fixture(scope="module")
def steps():
    """Figures by stage, of one micro-batch and of several."""
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "gpu.collectives"],
        env={**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"stage'):
            ((name, figures),) = json.loads(line).items()
            found.setdefault(int(name.split(",")[0].removeprefix("stage ")), []).append(figures)
    return found


def test_under_stage_1_gradients_are_summed_once_and_under_2_and_3_for_every_micro_batch(steps):
    for stage, sums in ((1, "allreduce"), (2, "allreduce"), (3, "reduce_scatter_base")):
        one, several = steps[stage]
        assert one["micro_batches"] == 1 < several["micro_batches"]
        for step in (one, several):
            times = 1 if stage == 1 else step["micro_batches"]
            given = step["elements"][sums] / (
                1.5 if stage == 3 else 1
            )  # inputs, and a half of them
            assert given == pytest.approx(times * step["parameters"], abs=SMALL)


def test_sums_are_in_the_precision_of_training_and_weights_are_gathered_once_per_step(steps):
    for stage in (1, 2):
        one, several = steps[stage]
        assert one["bytes"]["allreduce"] == pytest.approx(2 * one["parameters"], abs=2 * SMALL)
        assert one["elements"]["allgather_base"] == several["elements"]["allgather_base"]


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_step_takes_what_the_plan_counts(steps, stage):
    held = {1: 2 + 4 + (8 + 4) / 2, 2: 2 + (4 + 8 + 4) / 2}  # weights, gradients, moments, copy
    runner = RunnerSpec(device="cpu", dtype="bfloat16", zero_stage=stage, ranks=2)
    for step in steps[stage]:
        finish = estimate_finish_bytes(runner, load_model_shape(MODEL), step["parameters"])
        planned = held[stage] * step["parameters"] + sum(finish.values())
        assert step["optimizer_step_bytes"] == pytest.approx(planned, rel=0.01)


def test_under_stage_1_the_gradients_of_a_micro_batch_stay_beside_the_next_one(steps):
    grown = {
        stage: (several["before_last_forward"] - several["before_first_forward"])
        / several["parameters"]
        for stage, (_, several) in steps.items()
        if stage < 3
    }
    assert grown[1] == pytest.approx(2, abs=0.05), "in bfloat16"
    assert grown[2] == pytest.approx(4 / 2, abs=0.05), "added up, in float32, over two ranks"
