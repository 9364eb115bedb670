"""A warm start that all ranks train together, beside one that a single process trains.

`measure_warm_start.py` measures, on two ranks; here its figures are judged.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rows import each_row
from torchrun import run_ranks

from rlx.plan import read_spec
from rlx.run import warm_start

SCRIPT = Path(__file__).with_name("measure_warm_start.py")
RANKS = 2
CUT = pytest.mark.parametrize("how", ["one micro-batch", "several"])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run_ranks(RANKS, SCRIPT, tmp_path_factory.mktemp("warm"))


@CUT
def test_ranks_together_learn_what_one_process_learns(measured, how):
    found = measured[how]
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    assert found["apart"] < 0.02 * found["learned"]


@CUT
def test_each_has_a_part_of_it_and_nothing_stays(measured, how):
    found = measured[how]
    assert found["held"] == pytest.approx(1 / RANKS, rel=0.01)
    assert found["storages"] > 20
    assert found["left"] == 0, "the learner needs the memory"


@CUT
def test_all_begin_with_one_result_that_the_next_run_finds(measured, how):
    found = measured[how]
    assert found["alike on every rank"]
    assert found["reused"]
    ((kind, message),) = found["events"]
    assert kind == "warm_start"
    assert message.endswith("which 2 ranks have trained together")


def test_each_order_of_sums_has_an_entry_of_its_own_in_the_cache(measured):
    (alone,) = measured["of one process"]
    assert alone in measured["cache"]
    assert len(measured["cache"]) == 3


def test_the_result_of_one_process_does_not_depend_on_the_ranks(measured):
    assert measured["alone"] == 0


@each_row(
    "fits, stage, count, together",
    [
        ((False, True), 3, 2, True),
        ((True, True), 3, 2, False),
        ((False, False), 3, 2, False),
        ((False, True), 2, 2, False),
        ((False, True), 3, 1, False),
    ],
)
def test_ranks_train_together_only_what_one_cannot(monkeypatch, fits, stage, count, together):
    alone, shared = fits
    monkeypatch.setattr(
        warm_start,
        "fits_warm_start",
        lambda policy, device, parts=1: alone if parts == 1 else shared,
    )
    ranks = SimpleNamespace(
        count=count, device=torch.device("cpu"), gather=lambda one: [one] * count
    )
    spec = read_spec(SCRIPT.parents[2] / "experiments" / "rlcr.yaml", []).spec
    assert spec.model.warm_start
    runner = spec.runner.model_copy(update={"zero_stage": stage})
    spec = spec.model_copy(update={"runner": runner})
    assert warm_start._is_shared(None, spec, ranks) is together
    without = spec.model.model_copy(update={"warm_start": None})
    assert not warm_start._is_shared(None, spec.model_copy(update={"model": without}), ranks)
