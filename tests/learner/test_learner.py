"""The learner on one rank and on two, under every ZeRO stage, against plain PyTorch and peft.

`measure_learner.py` measures, once for each number of ranks; here its figures are judged.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from forked import cold_starts
from patience import stop_process

from rlx.learner import learning_rate
from rlx.spec import OptimizerSpec

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
DEALT = {
    1: {"whole": [[5]], "several": [[1, 1, 1, 2]], "cut": [[1, 1, 1, 1, 1, 1]]},
    2: {"whole": [[2], [3]], "several": [[1, 1], [1, 2]], "cut": [[1, 1, 1], [1, 1, 1]]},
}
"""By number of ranks: packed trees in every micro-batch of every rank; 0 is a filler."""
VALUES = ("values", "longer values")
"""Losses with an expected score, of values of one token and of several."""
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"}
ON_GPU = os.environ.get("RLX_TEST_DEVICE", "cpu") != "cpu"
if not ON_GPU:
    QUIET["CUDA_VISIBLE_DEVICES"] = ""
EXTREMES = {1: (0, 3), 2: (0, 3)} if ON_GPU else {1: (0,), 2: (3,)}
"""By number of ranks, the ZeRO stages at which everything is tried: see `measure_learner.py`."""


def has_gpus(ranks):
    """Whether there is a GPU for every rank, if tests run on GPUs."""
    return not ON_GPU or torch.cuda.device_count() >= ranks


def start(ranks, folder):
    """Starts measuring. One rank must do without any compiler: nothing is on its path."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    roots = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **QUIET, "PYTHONPATH": roots.rstrip(os.pathsep)}
    alone = ranks == 1 and not ON_GPU  # there, Triton compiles kernels
    if alone:
        launcher = []
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        environment["PATH"] = str(folder / "no-programs-here")
        environment["TORCH_EXTENSIONS_DIR"] = str(folder / "no-extensions-here")
    command = [sys.executable, "-m", *launcher, "measure_learner", str(folder / "measured.json")]
    with (folder / "log").open("w") as log, cold_starts() if alone else nullcontext():
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def measuring(tmp_path_factory):
    """Both measurements under way, side by side: what they take is mostly time to start."""
    folders = {ranks: tmp_path_factory.mktemp("learner") for ranks in DEALT if has_gpus(ranks)}
    processes = {ranks: start(ranks, folder) for ranks, folder in folders.items()}
    yield {ranks: (processes[ranks], folders[ranks]) for ranks in folders}
    for process in processes.values():
        stop_process(process)


@pytest.fixture(scope="module", params=DEALT, ids=["one rank", "two ranks"])
def ranks(request):
    if not has_gpus(request.param):
        pytest.skip(f"{request.param} ranks need as many GPUs")
    return request.param


@pytest.fixture(scope="module")
def measured(measuring, ranks):
    """Figures by ZeRO stage."""
    process, folder = measuring[ranks]
    assert process.wait() == 0, (folder / "log").read_text()[-4000:]
    return json.loads((folder / "measured.json").read_text())


def at_stages(stages):
    """Every measurement at its stages, on one rank and on two; by default, at the extreme ones."""
    cases = [
        pytest.param(ranks, stage, cut, id=f"{number}-{stage}-{cut}")
        for ranks, number in ((1, "one rank"), (2, "two ranks"))
        for cut, several in stages.items()
        for stage in several or EXTREMES[ranks]
    ]
    return pytest.mark.parametrize(("ranks", "stage", "cut"), cases, indirect=["ranks"])


def near(figures):
    return pytest.approx(figures, rel=1e-5, abs=1e-6)


# One gradient, however the batch is cut ----------------------------------------------------------


@at_stages(
    {
        **dict.fromkeys(("whole", "several", "cut", "adapters"), range(4)),
        **dict.fromkeys(("a cache with gradient", "plain rows", "recomputed")),
    }
)
class TestOneStep:
    @pytest.fixture
    def found(self, measured, stage, cut):
        return measured[str(stage)][cut]

    def test_every_gradient_is_the_plain_one(self, found):
        assert found["worst"] <= 5e-6
        assert found["whole"] <= 5e-6

    def test_sgd_takes_off_what_plain_sgd_does(self, found):
        assert found["taken_off"] <= 5e-6

    def test_every_rank_runs_as_many_micro_batches(self, found, ranks, cut):
        assert found["dealt"] == DEALT[ranks].get(cut, DEALT[ranks]["several"])

    def test_figures_are_the_plain_ones(self, found):
        assert found["found"] == near(found["plain"])

    def test_logprobs_are_the_plain_ones_where_wanted(self, found):
        assert found["logprobs_apart"] <= 5e-6
        assert found["logprobs_outside"] == 0

    def test_without_a_signal_nothing_is_done(self, found):
        assert found["silent"]
        assert found["silence_changes_nothing"]

    def test_all_ranks_end_with_the_same_weights(self, found):
        assert found["ranks_agree"]

    def test_shared_prefixes_are_computed_once(self, found, cut):
        if cut == "plain rows":
            assert found["computed_tokens"] == found["row_tokens"]
        else:
            assert found["computed_tokens"] < found["row_tokens"] / 3

    def test_the_form_is_the_one_that_fits(self, found, cut):
        named = cut in ("a cache with gradient", "plain rows")
        usual = "flex attention" if ON_GPU else "grouped attention"
        assert found["form"] == (cut if named else usual)

    def test_the_batch_covers_what_it_should(self, found):
        assert 0.05 < found["found"]["clip_fraction"] < 0.6
        assert 1 < found["bonus_entropy"] < 5


@at_stages(dict.fromkeys(["gspo", "cispo", "none", "penalty", "all"], (0,)) | dict.fromkeys(VALUES))
def test_every_choice_of_loss_is_the_plain_one_however_cut(measured, stage, cut):
    choice, found = cut, measured[str(stage)][cut]
    assert found["worst"] <= 5e-6
    assert found["found"] == near(found["plain"])
    assert (found["found"]["clip_fraction"] > 0.05) == (choice != "none")
    assert found["penalised"] == (choice in ("penalty", "all"))
    if choice in VALUES:
        assert 0 < found["expected_score"] < found["stated_mass"] < 1
    else:
        assert found["expected_score"] is None


@STAGES
@pytest.mark.parametrize("ranks", [2], ids=["two ranks"], indirect=True)
def test_a_rank_without_a_tree_takes_the_same_step(measured, stage):
    found = measured[str(stage)]["one_tree"]
    assert found["dealt"] == [[1], [0]]
    assert found["apart"] <= 5e-6


@STAGES
def test_three_usual_steps_are_those_of_plain_adamw(measured, stage):
    # The bound that the project sets for gradients holds for whole steps of Adam as well.
    assert measured[str(stage)]["usual_steps"]["apart"] <= 5e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimiser_in_the_hosts_memory_takes_the_same_steps(measured, stage):
    assert measured[str(stage)]["offloaded"]["apart"] <= 5e-6


@STAGES
@pytest.mark.parametrize("which", ["usual_steps", "adapters"])
@pytest.mark.parametrize("what", ["names", "weights", "logits"])
def test_an_export_is_what_was_learned(measured, stage, which, what):
    found = measured[str(stage)][which]["export"]
    assert found[what]
    assert found["dtype"] == "torch.float32"


@STAGES
def test_a_merged_model_is_the_adapted_one(measured, stage):
    found = measured[str(stage)]["adapters"]["export"]
    assert found["apart"] <= 1e-5
    assert found["alone_apart"] <= 1e-5, "the adapter alone, as peft reads it"
    attention = ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert found["changed"] == sorted(["down_proj", "gate_proj", "up_proj", *attention])


def test_bfloat16_is_near_float32(measured):
    found = measured["2"]["bfloat16"]
    assert found["loss"] == pytest.approx(1, rel=3e-2)
    assert found["taken_off"] < 0.2
    assert found["dtype"] == "torch.bfloat16"
    assert found["buffers"] == ["torch.float32"], "positions would be rounded"


@STAGES
@pytest.mark.parametrize("what", ["fresh", "fresh adapters"])
def test_a_phase_begins_with_its_own_bound_and_without_memory(measured, stage, what):
    found = measured[str(stage)][what]
    assert found["apart"] <= 5e-6
    assert found["reported"] == pytest.approx(1, rel=1e-6), "the norm is that before clipping"


@STAGES
def test_memory_is_carried_over_where_asked(measured, stage):
    assert measured[str(stage)]["carried"]["apart"] > 0.1


# Reference ---------------------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("which", ["frozen copy", "adapter-free"])
def test_a_reference_is_the_policy_without_what_it_learned(measured, stage, which):
    found = measured[str(stage)][which]
    assert found["base_apart"] <= 5e-6
    assert found["outside"] == 0
    assert found["stays"]
    assert found["moved"] > 1, "while the policy went away"
    assert found["gradient_apart"] <= 5e-6, "asking changes nothing"


@STAGES
def test_a_frozen_copy_begins_as_the_policy_and_adapters_are_taken_off(measured, stage):
    frozen, bare = (measured[str(stage)][which] for which in ("frozen copy", "adapter-free"))
    assert frozen["own_apart"] == 0
    assert bare["own_apart"] > 1
    assert frozen["described"] == "a frozen copy of the policy from the start of training"
    assert bare["described"] == "the model without its adapters"


def test_a_frozen_copy_is_rounded_as_the_policy_is(measured):
    assert measured["2"]["bfloat16 reference"]["own_apart"] == 0


# Critic ------------------------------------------------------------------------------------------


@at_stages({"whole": None, "several": None, "cut": range(4)})
class TestCritic:
    @pytest.fixture
    def found(self, measured, stage, cut):
        return measured[str(stage)][f"critic {cut}"]

    def test_every_gradient_is_the_plain_one(self, found):
        assert found["worst"] <= 5e-6

    def test_values_are_the_plain_ones_where_wanted(self, found):
        assert found["values_apart"] <= 5e-6
        assert found["values_outside"] == 0

    def test_figures_are_the_plain_ones(self, found, cut):
        assert found["found"] == near(found["plain"])
        assert (found["found"]["clip_fraction"] > 0.05) == (cut != "whole"), "that one has no clip"

    def test_without_a_token_nothing_is_done(self, found):
        assert found["silent"]

    def test_the_learner_beside_it_takes_its_own_step(self, found):
        assert found["learner_apart"] <= 5e-6


def test_a_critic_in_bfloat16_is_near_one_in_float32(measured):
    found = measured["2"]["bfloat16 critic"]
    assert 0 < found["values_apart"] < 0.05
    assert found["found"]["loss"] == pytest.approx(found["plain"]["loss"], rel=2e-2)
    assert found["worst"] < 0.5


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


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_warm_up_comes_first_and_the_fall_begins_at_the_peak(schedule):
    found = rates(steps=8, schedule=schedule, warmup_steps=4)
    assert found[:5] == [0.5, 1, 1.5, 2, 2]
    assert found[4:] == sorted(found[4:], reverse=True)
    assert 0 < found[-1] < 1


def test_a_phase_of_warm_up_alone():
    assert rates(steps=2, schedule="linear", warmup_steps=4) == [0.5, 1]
