"""Starts `tests/learner/measure_learner.py`, and judges the figures of one ZeRO stage.

It measures the learner on every rank against plain PyTorch and peft.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["ON_GPU", "judge_stage", "measure_learner"]

ON_GPU = os.environ.get("RLX_TEST_DEVICE", "cpu") != "cpu"
DEALT = {
    1: {"whole": [[43]], "several": [[9, 12, 14, 8]], "cut": [[6, 3, 9, 14, 4, 7]]},
    2: {
        "whole": [[18], [25]],
        "several": [[9, 14], [12, 8]],
        "cut": [[6, 9, 4], [3, 14, 7]],
    },
}
"""By number of ranks: rows in every micro-batch of every rank; 0 is a filler."""
EXACT = 5e-6
"""Relative distance of gradients and of whole steps from plain ones."""
STEPS = ("whole", "several", "cut", "adapters", "a cache with gradient", "plain rows", "recomputed")
LOSSES = ("penalty", "all", "values", "longer values")
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"}


def measure_learner(ranks, stages, folder):
    """Figures by ZeRO stage. One rank must do without any compiler: nothing is on its path."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    rooms = [str(Path(__file__).parent / "learner"), os.environ.get("PYTHONPATH", "")]
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
        [*command, *map(str, stages)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "measured.json").read_text())


def judge_stage(figures, ranks, stage):
    """Asserts what holds of every measurement of one stage."""
    for name in STEPS:
        if name in figures:
            _judge_step(figures[name], ranks, name)
    for name in LOSSES:
        if name in figures:
            _judge_loss(figures[name], name)
    for name in ("whole", "several", "cut"):
        if f"critic {name}" in figures:
            _judge_critic(figures[f"critic {name}"], name)
    _judge_phases(figures)
    _judge_exports(figures)
    _judge_references(figures)
    if stage:
        assert figures["offloaded"]["apart"] <= EXACT, "the optimizer in the host's memory"
    if ranks > 1:
        assert figures["one_row"]["dealt"] == [[1], [0]], "a rank without a row"
        assert figures["one_row"]["apart"] <= EXACT
    if "bfloat16" in figures:
        _judge_half_precision(figures)


def _near(figures):
    return pytest.approx(figures, rel=1e-5, abs=1e-6)


def _judge_step(found, ranks, cut):
    """One step of SGD is the plain one, however the batch is cut and whichever form computes it."""
    assert max(found["worst"], found["whole"], found["taken_off"]) <= EXACT, cut
    assert found["dealt"] == DEALT[ranks].get(cut, DEALT[ranks]["several"])
    assert found["found"] == _near(found["plain"])
    assert found["logprobs_apart"] <= EXACT and found["logprobs_outside"] == 0
    assert found["silent"] and found["silence_changes_nothing"], "a step without a signal"
    assert found["ranks_agree"]
    named = cut in ("a cache with gradient", "plain rows")
    assert found["form"] == (cut if named else "flex attention" if ON_GPU else "grouped attention")
    if cut == "plain rows":
        assert found["computed_tokens"] == found["row_tokens"]
    else:
        assert found["computed_tokens"] < found["row_tokens"] / 3, "shared prefixes count once"
    assert 0.05 < found["found"]["clip_fraction"] < 0.6, "the batch covers what it should"
    assert 1 < found["bonus_entropy"] < 5


def _judge_loss(found, choice):
    assert found["worst"] <= EXACT, choice
    assert found["found"] == _near(found["plain"])
    assert found["found"]["clip_fraction"] > 0.05
    assert found["penalised"] == (choice in ("penalty", "all"))
    if choice in ("values", "longer values"):
        assert 0 < found["expected_score"] < found["stated_mass"] < 1
    else:
        assert found["expected_score"] is None


def _judge_critic(found, cut):
    assert found["worst"] <= EXACT, cut
    assert found["values_apart"] <= EXACT and found["values_outside"] == 0
    assert found["found"] == _near(found["plain"])
    assert (found["found"]["clip_fraction"] > 0.05) == (cut != "whole"), "that one has no clip"
    assert found["silent"], "a step without a token"
    assert found["learner_apart"] <= EXACT, "the learner beside it takes its own step"


def _judge_phases(figures):
    for what in ("fresh", "fresh adapters"):
        assert figures[what]["apart"] <= EXACT, "a phase begins with its own bound"
        assert figures[what]["reported"] == pytest.approx(1, rel=1e-6), "the norm before clipping"
    assert figures["carried"]["apart"] > 0.1, "moments are carried over where asked"
    assert figures["usual_steps"]["apart"] <= EXACT, "three steps of AdamW"


def _judge_exports(figures):
    for which in ("usual_steps", "adapters"):
        export = figures[which]["export"]
        assert export["names"] and export["weights"] and export["logits"]
        assert export["dtype"] == "torch.float32"
    export = figures["adapters"]["export"]
    assert export["apart"] <= 1e-5, "a merged model is the adapted one"
    assert export["alone_apart"] <= 1e-5, "the adapter alone, as peft reads it"
    attention = ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert export["changed"] == sorted(["down_proj", "gate_proj", "up_proj", *attention])


def _judge_references(figures):
    frozen, bare = figures["frozen copy"], figures["adapter-free"]
    for found in (frozen, bare):
        assert found["base_apart"] <= EXACT and found["outside"] == 0
        assert found["stays"] and found["moved"] > 1, "while the policy goes away"
        assert found["gradient_apart"] <= EXACT, "asking changes nothing"
    assert frozen["own_apart"] == 0 and bare["own_apart"] > 1
    assert frozen["described"] == "a frozen copy of the policy from the start of training"
    assert bare["described"] == "the model without its adapters"


def _judge_half_precision(figures):
    found, critic = figures["bfloat16"], figures["bfloat16 critic"]
    assert found["loss"] == pytest.approx(1, rel=3e-2)
    assert found["taken_off"] < 0.2
    assert found["dtype"] == "torch.bfloat16"
    assert found["buffers"] == ["torch.float32"], "positions would be rounded"
    assert figures["bfloat16 reference"]["own_apart"] == 0, "it is rounded as the policy is"
    assert 0 < critic["values_apart"] < 0.05
    assert critic["found"]["loss"] == pytest.approx(critic["plain"]["loss"], rel=2e-2)
    assert critic["worst"] < 0.5
