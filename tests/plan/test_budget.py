"""Tokens and memory of a step."""

import json
from pathlib import Path

import pytest
from rows import each_row

from rlx.model import build_policy
from rlx.plan import read_spec
from rlx.plan.memory import estimate_disk, load_model_shape
from rlx.spec import Lora, PretrainedModelSpec, TinyModelSpec

PROMPTS = 3
EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@each_row("sizes", [{}, {"heads": 2, "kv_heads": 1, "layers": 2, "head_dim": 64}])
def test_parameters_of_a_tiny_model(sizes):
    spec = TinyModelSpec(**sizes)
    model = build_policy(spec, seed=0).model
    assert load_model_shape(spec).parameters == model.num_parameters()


def test_parameters_of_files_at_hand(tmp_path):
    spec = PretrainedModelSpec(path=str(tmp_path))
    build_policy(TinyModelSpec(), seed=0).save(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # weights are not needed
    assert load_model_shape(spec) == load_model_shape(TinyModelSpec())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": config["model_type"]}))
    assert load_model_shape(spec) is None


def test_adapters():
    shape = load_model_shape(TinyModelSpec())
    every = shape.count_learned(Lora(rank=2))
    (one,) = {
        shape.count_learned(Lora(rank=2, targets=(name,))) for name in ("gate_proj", "up_proj")
    }
    assert one == TinyModelSpec().layers * 2 * (96 + 256)
    assert every > 4 * one


@each_row(
    ("sets", "checkpoints", "kept"),
    [
        ([], 3, 0),
        (["runner.checkpoint={every: 1, keep: 1}"], 2, 0),
        (["runner.checkpoint={every: 0}"], 0, 0),
        (["runner.checkpoint={every: 1, keep: 1, keep_finished: true}"], 2, 1),
    ],
)
def test_a_run_takes_its_checkpoints_and_its_model_on_disk(sets, checkpoints, kept):
    """A checkpoint of float32 weights with both moments is three times the model."""
    spec = read_spec(EXPERIMENTS / "smollm2_grpo.yaml", sets).spec
    shape = load_model_shape(TinyModelSpec())
    disk, model = estimate_disk(spec, shape), 4 * shape.parameters
    assert disk.checkpoint == 4 * model and disk.checkpoints == checkpoints
    assert disk.training == checkpoints * disk.checkpoint + model
    assert disk.finished == kept * disk.checkpoint + model


def test_tokens_of_a_step_are_those_of_its_trees(plan):
    phase = plan("rlcr", f"rollout.prompts_per_step={PROMPTS}").phases[-1]
    own = sum(len(row.tokens) for row in phase.rows)
    whole = own + sum(c.tokens for row in phase.rows for c in row.context)
    assert phase.tokens.sampled[0] == pytest.approx(own)
    assert phase.tokens.sampled[0] < phase.tokens.sampled[1]
    assert own < phase.tokens.shared[0] < whole


def test_what_is_sampled_but_not_trained_on_is_in_the_budget(plan):
    plain = plan("countdown").phases[0].tokens
    (level,) = plain.levels
    again = plan("countdown", "rollout.dynamic_sampling={max_batches: 3}").phases[0].tokens
    assert again.sampled == (plain.sampled[0], 3 * plain.sampled[1])
    greedy = plan("countdown", "estimator={name: remax}").phases[0].tokens
    assert greedy.sampled[1] == plain.sampled[1] + level.openings * level.at_most
    assert greedy.sampled[0] == pytest.approx(plain.sampled[0] + level.openings * level.made_up)
    assert again.shared == greedy.shared == plain.shared


def test_what_all_prompts_begin_with_is_counted_once(plan):
    bare = plan("countdown").phases[0].tokens
    told = plan("countdown", "rollout.system=1 2 3 4 5 6 7 8").phases[0].tokens
    (before,), (after,) = bare.levels, told.levels
    added = after.opening - before.opening
    assert added >= 8
    assert told.common - bare.common == added
    for one, other in zip(told.shared, bare.shared, strict=True):
        assert one - other == pytest.approx(added)


def test_a_reference_is_counted_by_its_own_size(plan):
    own = (
        plan(
            "distill",
            "model.reference=null",
            "rewards.turn._accuracy.weight=1",
            "rewards.turn.a={plugin: countdown.verify, turn: answer}",
        )
        .phases[0]
        .memory
    )
    other = plan("distill").phases[0].memory
    tiny = {"hidden_size": 96, "layers": 3, "intermediate_size": 256, "tokenizer": "arithmetic"}
    sizes = [
        load_model_shape(TinyModelSpec(**shape)).parameters
        for shape in ({**tiny, "hidden_size": 64, "layers": 2}, tiny)
    ]
    held = [memory.parts["reference policy"] for memory in (own, other)]
    assert held == [4 * size for size in sizes]


def test_memory_follows_the_runner(plan):
    def parts(*overrides):
        return plan("rlcr", *overrides).phases[-1].memory.parts

    alone, four = parts("runner.zero_stage=2"), parts("runner.zero_stage=2", "runner.ranks=4")
    assert four["Adam's moments"] == alone["Adam's moments"] // 4
    assert four["gradients"] == alone["gradients"] // 4
    assert four["weights"] == alone["weights"]
    half = parts("runner.zero_stage=2", "runner.dtype=bfloat16")
    assert half["the sampler's copy"] == alone["the sampler's copy"] // 2
    assert half["float32 copy"] == alone["float32 copy"]
