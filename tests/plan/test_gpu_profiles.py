"""What the GPU profiles say about the GPUs that they need, against their plans; and the plans'
memory against that of fake tensors."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from fake_memory import measure_update
from rows import each_row

from rlx.learner import forward
from rlx.plan import load_model_shape, memory, read_spec
from rlx.plan.memory import estimate_update_bytes

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PROFILES = sorted(
    str(path.relative_to(EXPERIMENTS).with_suffix(""))
    for path in EXPERIMENTS.rglob("*.yaml")
    if re.search(r"^model: .*kind: pretrained", path.read_text(), re.MULTILINE)
)
LAYERS = 8
"""Layers that are measured; every further one adds the same."""


def test_the_learners_limits_are_those_of_the_plan():
    assert (memory.WHOLE_LOGITS, memory.CHUNK) == (forward.WHOLE_LOGITS, forward.CHUNK)


def list_updates():
    """The different updates of all profiles, by shape and settings."""
    found = {}
    for name in PROFILES:
        spec = read_spec(EXPERIMENTS / f"{name}.yaml").spec
        runner = spec.runner
        key = (spec.model.path.removesuffix("-Instruct"), runner.micro_batch_tokens)
        key += (runner.activation_checkpointing, runner.zero_stage == 3)
        found.setdefault(key, (name, spec))
    return found.values()


def test_an_update_needs_what_fake_tensors_need():
    for name, spec in list_updates():
        runner, shape = spec.runner, replace(load_model_shape(spec.model), layers=LAYERS)
        tokens = runner.micro_batch_tokens
        targets = int(tokens * 0.8)
        planned = sum(estimate_update_bytes(runner, shape, tokens, targets).values())
        measured = measure_update(
            shape,
            tokens,
            targets,
            recomputes=runner.activation_checkpointing,
            chunks=runner.zero_stage != 3,
        )
        assert planned == pytest.approx(measured, rel=0.1), (name, planned / 2**30)


def read_needs(name):
    """The number of GPUs, and the GB of each, that a profile's heading names."""
    heading = (EXPERIMENTS / f"{name}.yaml").read_text().partition("\nname:")[0]
    said = re.sub(r"\n# ", " ", heading)
    found = re.search(r"Needs (?:one node with )?(one|\d+) GPUs? of (\d+) GB", said)
    assert found, f"{name} does not say which GPUs it needs"
    return 1 if found[1] == "one" else int(found[1]), int(found[2])


@each_row("name", PROFILES)
def test_a_profile_fits_the_gpus_that_it_names(plan, name):
    ranks, size = read_needs(name)
    spec = read_spec(EXPERIMENTS / f"{name}.yaml").spec
    assert spec.runner.ranks == ranks
    for phase in plan(name).phases:
        assert phase.gpus[f"{size} GB"] <= phase.gpu_room, phase.memory.stage_totals


def test_a_gpu_has_room_for_what_vllm_is_given(plan):
    alone, beside = (
        plan("rlcr_1.5b", f"sampler={{engine: vllm, gpu_memory_utilization: {share}}}").phases[-1]
        for share in (0.5, 0.8)
    )
    assert beside.gpus["80 GB"] == pytest.approx(alone.gpus["80 GB"] + 0.3, abs=1e-3)
