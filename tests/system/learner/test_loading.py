"""Weights that are loaded one by one, in the precision of training, against plain loading.

`measure_loading.py` measures, on three ranks; here its figures are judged.
"""

from pathlib import Path

import pytest
from torchrun import run_ranks

SCRIPT = Path(__file__).with_name("measure_loading.py")
STAGES = pytest.mark.parametrize("stage", ["0", "1", "2", "3"])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Figures of three ranks: of few weights, all have parts of one size."""
    return run_ranks(3, SCRIPT, tmp_path_factory.mktemp("loading"))


def test_every_case_begins_with_the_files_and_takes_the_step_of_plain_loading(measured):
    assert len(measured["cases"]) == 9
    wrong = {
        case: [name for name, holds in found.items() if not holds]
        for case, found in measured["cases"].items()
        if not all(found.values())
    }
    assert not wrong


@STAGES
def test_critic_and_reference_are_those_of_plain_loading(measured, stage):
    found = measured["critics"][stage]
    assert all(found.values()), found
