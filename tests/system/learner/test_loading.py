"""Weights that are loaded one by one, in the precision of training, against plain loading.

`measure_loading.py` measures, on three ranks; here its figures are judged.
"""

from pathlib import Path

from torchrun import run_ranks

SCRIPT = Path(__file__).with_name("measure_loading.py")


def test_every_case_begins_with_the_files_and_takes_the_step_of_plain_loading(tmp_path):
    """On three ranks: of few weights, all have parts of one size."""
    measured = run_ranks(3, SCRIPT, tmp_path)
    assert len(measured) == 9
    wrong = {
        case: [name for name, holds in found.items() if not holds]
        for case, found in measured.items()
        if not all(found.values())
    }
    assert not wrong
