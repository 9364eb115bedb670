"""The learner against plain PyTorch and peft: on one rank, and on two under every ZeRO stage.

`measure_learner.py` measures, all stages of a number of ranks in one start.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rows import each_row

from rlx.learner import learning_rate
from rlx.spec import OptimizerSpec

ON_GPU = os.environ.get("RLX_TEST_DEVICE", "cpu") != "cpu"
EXACT = 5e-6
"""Relative distance of gradients and of whole steps from plain ones."""
STAGES = {1: (0, 3), 2: (0, 1, 2, 3)}
"""By number of ranks, the ZeRO stages that are measured."""
STEPS = ("several", "cut", "adapters", "recomputed")
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"}
CASES = [
    pytest.param((ranks, stage), id=f"{ranks}-{stage}", marks=[pytest.mark.system] * (ranks - 1))
    for ranks, stages in STAGES.items()
    for stage in stages
]


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    """Measures the learner on some ranks, once: figures by ZeRO stage."""

    @functools.cache
    def start_measuring(ranks):
        return measure_learner(ranks, tmp_path_factory.mktemp(f"learner-{ranks}"))

    return start_measuring


def measure_learner(ranks, folder):
    """Figures by ZeRO stage. One rank must do without any compiler: nothing is on its path."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    tests = Path(__file__).parents[1]
    rooms = [str(tests / "learner"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(rooms).rstrip(os.pathsep)}
    if not ON_GPU:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if ranks == 1 and not ON_GPU:  # there, Triton compiles kernels
        launcher = []
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        environment["PATH"] = str(folder / "no-programs-here")
        environment["TORCH_EXTENSIONS_DIR"] = str(folder / "no-extensions-here")
    command = [sys.executable, "-m", *launcher, "measure_learner", str(folder / "measured.json")]
    done = subprocess.run(
        [*command, *map(str, STAGES[ranks])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "measured.json").read_text())


@pytest.fixture(params=CASES)
def case(request):
    return request.param


@pytest.fixture
def figures(measure, case):
    ranks, stage = case
    if ON_GPU and torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks need as many GPUs")
    return measure(ranks)[str(stage)]


pytestmark = pytest.mark.timeout(900)  # the first waits for all figures


def near(figures):
    return pytest.approx(figures, rel=1e-5, abs=1e-6)


def test_a_step_is_the_plain_one_however_rows_are_cut_and_computed(figures):
    for name in STEPS:
        if (found := figures.get(name)) is None:
            continue
        assert found["worst"] <= EXACT, name
        assert found["found"] == near(found["plain"])
        assert found["logprobs_apart"] <= EXACT and found["logprobs_outside"] == 0
        assert found["silent"] and found["silence_changes_nothing"], "a step without a signal"
        assert found["ranks_agree"]
        assert 0.05 < found["found"]["clip_fraction"] < 0.6, "the batch covers what it should"
        assert 1 < found["bonus_entropy"] < 5


def test_shared_prefixes_are_computed_once(figures):
    for name in STEPS:
        if (found := figures.get(name)) is None:
            continue
        assert found["form"] == ("flex attention" if ON_GPU else "grouped attention")
        assert found["computed_tokens"] < found["row_tokens"] / 3


def test_expected_scores_are_learned_as_in_plain_forwards(figures):
    for name in ("values", "longer values"):
        if (found := figures.get(name)) is not None:
            assert found["worst"] <= EXACT, name
            assert found["found"] == near(found["plain"])
            assert 0 < found["expected_score"] < found["stated_mass"] < 1


def test_a_critic_learns_as_plain_pytorch_does_beside_the_learner(figures):
    for name, is_clipped in (("critic cut", True), ("critic several", False)):
        if (found := figures.get(name)) is None:
            continue
        assert found["worst"] <= EXACT, name
        assert found["values_apart"] <= EXACT and found["values_outside"] == 0
        assert found["found"] == near(found["plain"])
        assert (found["found"]["clip_fraction"] > 0.05) == is_clipped
        assert found["silent"], "a step without a token"
        assert found["learner_apart"] <= EXACT, "the learner beside it takes its own step"


def test_a_phase_begins_with_its_own_bound_and_moments_where_asked(figures):
    assert figures["fresh"]["apart"] <= EXACT
    assert figures["fresh"]["reported"] == pytest.approx(1, rel=1e-6), "the norm before clipping"
    assert figures["carried"]["apart"] > 0.1, "moments are carried over"
    assert figures["usual_steps"]["apart"] <= EXACT, "three steps of AdamW"
    if "offloaded" in figures:
        assert figures["offloaded"]["apart"] <= EXACT, "the optimizer in the host's memory"


def test_an_export_is_the_learned_model(figures):
    export = figures["usual_steps"]["export"]
    assert export["names"] and export["weights"] and export["logits"]
    assert export["dtype"] == "torch.float32"


def test_a_reference_stays_while_the_policy_goes_away(figures):
    frozen, bare = figures["frozen copy"], figures["adapter-free"]
    for found in (frozen, bare):
        assert found["base_apart"] <= EXACT and found["outside"] == 0
        assert found["stays"] and found["moved"] > 1
        assert found["gradient_apart"] <= EXACT, "asking changes nothing"
    assert frozen["own_apart"] == 0 and bare["own_apart"] > 1
    assert frozen["described"] == "a frozen copy of the policy from the start of training"
    assert bare["described"] == "the model without its adapters"


@pytest.mark.system
def test_a_rank_without_a_row_takes_the_same_step(measure):
    for figures in measure(2).values():
        assert figures["one_row"]["apart"] <= EXACT


@pytest.mark.system
def test_bfloat16_is_near_float32(measure):
    figures = measure(2)["2"]
    found = figures["bfloat16"]
    assert found["loss"] == pytest.approx(1, rel=3e-2)
    assert found["apart"] < 0.2
    assert found["dtype"] == "torch.bfloat16"
    assert found["buffers"] == ["torch.float32"], "positions would be rounded"
    assert figures["bfloat16 reference"]["own_apart"] == 0, "it is rounded as the policy is"


@each_row(
    ("options", "expected"),
    [
        ({}, [2, 2, 2, 2]),
        ({"warmup_steps": 2}, [1, 2, 2, 2]),
        ({"schedule": "linear"}, [2, 1.5, 1, 0.5]),
        ({"schedule": "linear", "final_fraction": 0.5}, [2, 1.75, 1.5, 1.25]),
        ({"schedule": "linear", "warmup_steps": 2}, [1, 2, 2, 1]),
        ({"schedule": "cosine"}, [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5]),
        ({"schedule": "cosine", "warmup_steps": 2}, [1, 2, 2, 1]),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_schedule(options, expected):
    spec = OptimizerSpec(learning_rate=2.0, **options)
    assert [learning_rate(spec, step, 4) for step in range(4)] == pytest.approx(expected)
