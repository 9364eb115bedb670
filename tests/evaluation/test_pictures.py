import math

import numpy as np

from rlx.evaluation.calibration import measure_calibration
from rlx.evaluation.pictures import draw_learning_curves, draw_reliability_diagram

EVEN = measure_calibration(np.arange(101) % 2, np.linspace(0, 1, 101), ["2", "3"] * 50 + ["2"])
UNREADABLE = measure_calibration([0, 0], [math.nan, math.nan])


def test_equal_figures_give_equal_files(tmp_path):
    first, again = (
        draw_reliability_diagram(UNREADABLE, EVEN, tmp_path / folder / name)
        for folder, name in (("a", "rlcr-0.5"), ("b", "rlcr-0.5.png"))
    )
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert {path.name for path in (*first, *again)} == {"rlcr-0.5.png", "rlcr-0.5.svg"}
    noisy = [(step, math.sin(step) if step % 7 else math.nan) for step in range(60)]
    assert draw_learning_curves({"noisy": noisy, "once": [(0, 0.3)], "no": []}, tmp_path / "c")
