"""Tables of docs/gpu.md against the commands that make them."""

import re
from pathlib import Path

import pytest
from gpu import memory_table
from gpu.expect import expect_seconds

from rlx.checks import read_spec
from rlx.trial import GPUS, get_usable_share

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
PAGE = (ROOT / "docs" / "gpu.md").read_text()
TIMES = re.findall(r"^\| `(\w+[\d.]+b)` \| ([^|]*) \| (\d+) s \| (\d+) s \|$", PAGE, re.MULTILINE)
MEMORY = {
    cells[0].strip("`"): tuple(cells)
    for line in PAGE.splitlines()
    if len(cells := [cell.strip() for cell in line.split("|")[1:-1]]) == len(memory_table.HEADING)
}
MEASURED = ("countdown_7b", "rlcr_0.5b")
"""Profiles whose figures of fake tensors are made again; the command makes all of them."""
NEAR = 0.1


@pytest.mark.parametrize("row", TIMES, ids=lambda row: row[0])
def test_expected_times_are_those_of_the_model(plan, row):
    name, gpus, sampling, update = row
    spec = read_spec(EXPERIMENTS / f"{name}.yaml").spec
    gpu = GPUS["4090" if "4090" in gpus else "H100"]
    expected = expect_seconds(spec, plan(name).phases[-1], gpu, "transformers")
    assert [f"{seconds:.0f}" for seconds in expected] == [sampling, update]
    assert spec.runner.ranks == int(gpus.split()[0].replace("one", "1"))


def test_every_profile_has_its_row():
    assert len(TIMES) >= 10
    assert sorted(MEMORY.keys() - {"profile", "---"}) == memory_table.PROFILES


@pytest.mark.parametrize("name", memory_table.PROFILES)
def test_memory_is_what_is_planned_and_near_fake_tensors(plan, name):
    spec = read_spec(EXPERIMENTS / f"{name}.yaml").spec
    phase, row = plan(name).phases[-1], MEMORY[name]
    cells = memory_table.list_plan_cells(f"`{name}`", spec, phase)
    assert cells == (*row[:4], "", row[5], "", *row[7:])
    for planned, measured in (row[3:5], row[5:7]):
        if measured:
            assert float(planned) == pytest.approx(float(measured), rel=NEAR)
    if name in MEASURED:
        assert memory_table.format_row(f"`{name}`", spec, phase) == f"| {' | '.join(row)} |"


def test_a_gpu_has_room_for_what_vllm_is_given(plan):
    alone, beside = (
        plan("rlcr_1.5b", f"sampler={{engine: vllm, gpu_memory_utilization: {share}}}").phases[-1]
        for share in (0.5, 0.8)
    )
    assert beside.gpus["80 GB"] == pytest.approx(alone.gpus["80 GB"] + 0.3, abs=1e-3)
    spec = read_spec(EXPERIMENTS / "rlcr_1.5b.yaml", ["sampler={engine: vllm}"]).spec
    assert get_usable_share(spec.sampler) == alone.gpu_room > plan("rlcr_1.5b").phases[-1].gpu_room
