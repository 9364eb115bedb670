"""Memory of loading: in plans where it matters, and in the documentation's table."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from rlx.plan import LoadingMemory, estimate_loading, memory
from rlx.plan.model_shape import KNOWN
from rlx.spec import RunnerSpec

ROOT = Path(__file__).parents[2]
SHAPE = KNOWN["Qwen/Qwen2.5-14B"]


def test_a_plan_has_loading_as_a_stage_only_where_it_is_the_largest(plan, monkeypatch):
    usual = plan("rlcr_7b").phases[0].memory
    assert "loading" not in usual.stages
    most = LoadingMemory(host={}, device={"optimizer": 10**13, "trial of forms": 1})
    monkeypatch.setattr(memory, "estimate_loading", lambda *_: most)
    large = plan("rlcr_7b", "name=larger").phases[0].memory  # plans are made once
    assert large.largest_stage == "loading"
    assert large.total == 10**13 + large.parts["the sampler's copy"]
    assert {name: large.stage_totals[name] for name in usual.stages} == usual.stage_totals


def test_the_documentation_has_the_table_that_its_command_prints():
    rows = runpy.run_path(str(ROOT / "tests" / "gpu" / "loading.py"))["list_rows"](8)
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert len(rows) == 9
    for row in rows:
        assert f"| {' | '.join(row)} |" in page


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_more_ranks_need_less_of_a_device_and_no_more_of_the_host(stage):
    few, many = (
        estimate_loading(
            RunnerSpec(zero_stage=stage, dtype="bfloat16", ranks=ranks), SHAPE, SHAPE.parameters
        )
        for ranks in (2, 16)
    )
    assert few.host == many.host
    assert (many.peak < few.peak) == (stage > 0)


def test_frozen_weights_are_neither_put_in_a_row_nor_copied_to_float32():
    runner = RunnerSpec(zero_stage=2, dtype="bfloat16", ranks=8)
    frozen = estimate_loading(runner, SHAPE, 10**7)
    assert frozen.device["weights in a row"] == 2 * (SHAPE.parameters + 10**7)
    assert frozen.device["optimizer"] == 2 * SHAPE.parameters + 10**7


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_in_the_hosts_memory_is_none_of_the_device(stage):
    runner = RunnerSpec(zero_stage=stage, dtype="bfloat16", ranks=8)
    offloaded = runner.model_copy(update={"offload_optimizer": True})
    usual, less = (estimate_loading(one, SHAPE, 8 * 10**7) for one in (runner, offloaded))
    saved = usual.device["optimizer"] - less.device["optimizer"]
    assert saved == (8 if stage == 3 else 4) * 10**7


def test_weights_in_another_precision_are_private():
    for dtype, stored, width in (("bfloat16", 4, 2), ("float32", 2, 4)):
        runner = RunnerSpec(dtype=dtype, ranks=8)
        host = estimate_loading(runner, SHAPE, 1, stored_width=stored).host
        assert host == {
            memory.SHARED: stored * SHAPE.parameters,
            memory.PRIVATE: width * SHAPE.parameters,
        }


def test_a_small_model_has_no_more_layers_in_the_trial_than_it_has():
    runner = RunnerSpec(dtype="bfloat16")
    sizes = [
        estimate_loading(runner, replace(SHAPE, layers=n), 1).device["trial of forms"]
        for n in (1, 2, 3)
    ]
    assert sizes[0] < sizes[1] == sizes[2]
