import math
import sys
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
from rows import each_row

from rlx.evaluation.calibration import measure_calibration
from rlx.evaluation.pictures import (
    _draw_training_curve,
    build_figure,
    draw_learning_curves,
    draw_reliability_diagram,
)
from rlx.evaluation.reliability_text import render_reliability_text

CONFIDENCE = np.linspace(0, 1, 101)
OVERCONFIDENT = measure_calibration([1, 0, 0] * 33 + [0, 0], [0.95] * 101)
EVEN = measure_calibration(np.arange(101) % 2, CONFIDENCE, ["2", "3"] * 50 + ["2"])
UNREADABLE = measure_calibration([0, 0], [math.nan, math.nan])


def painted(png):
    """Share of pixels that are not white."""
    return float((matplotlib.image.imread(png)[..., :3].min(axis=2) < 0.98).mean())


@each_row("name", ["r.png", "rlcr-0.5"])
def test_a_reliability_diagram_is_a_png_and_an_svg(tmp_path, name):
    png, svg = draw_reliability_diagram(OVERCONFIDENT, EVEN, tmp_path / "plots" / name)
    stem = name.removesuffix(".png")
    assert (png.name, svg.name) == (f"{stem}.png", f"{stem}.svg")
    assert 0.02 < painted(png) < 0.4
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_equal_figures_give_equal_files(tmp_path):
    first, again = (
        draw_reliability_diagram(OVERCONFIDENT, EVEN, tmp_path / folder / "r") for folder in "ab"
    )
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_degenerate_evaluations_can_be_drawn(tmp_path):
    png, _ = draw_reliability_diagram(UNREADABLE, OVERCONFIDENT, tmp_path / "r")
    assert painted(png) > 0.02


def test_rounding_errors_of_a_constant_do_not_fill_its_panel():
    for value in (0.3, -2e-6, 0.0):
        (axes,) = build_figure(2, 2).subplots(1, 1, squeeze=False)[0]
        _draw_training_curve(axes, "x", [(n, value * (1 + n % 2 * 1e-9)) for n in range(60)])
        low, high = axes.get_ylim()
        margin = 0.1 * abs(value) or 0.1
        assert (low, high) == pytest.approx((value - margin, value + margin), rel=1e-6)


def test_learning_curves_of_any_number_with_gaps(tmp_path):
    steps = range(60)
    noisy = [(s, math.sin(s) if s % 7 else math.nan) for s in steps]
    curves = {"train/loss": noisy, "eval/test/ece": [(0, 0.3)], "empty": []}
    sizes = []
    for number in (1, 2, 3):
        png, svg = draw_learning_curves(dict(list(curves.items())[:number]), tmp_path / f"{number}")
        assert svg.exists()
        sizes.append(matplotlib.image.imread(png).shape[1])
    assert sizes == sorted(set(sizes))
    png, _ = draw_learning_curves({str(i): noisy for i in range(7)}, tmp_path / "many")
    assert painted(png) > 0.02


def test_drawing_leaves_pyplot_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    draw_reliability_diagram(EVEN, EVEN, tmp_path / "r")
    assert "matplotlib.pyplot" not in sys.modules


@each_row("calibration", [OVERCONFIDENT, EVEN, UNREADABLE])
@each_row("width", [66, 80])
def test_the_terminal_diagram_fits_and_says_every_bin(calibration, width):
    lines = render_reliability_text(calibration, width=width).plain.splitlines()
    held = [b["n"] for b in calibration["bins"] if b["n"]]
    assert max(map(len, lines)) <= 80
    assert max(map(len, lines[: len(held) + 1])) <= width
    assert [int(line.split()[-1]) for line in lines[1 : len(held) + 1]] == held
    assert f"{calibration['n']} answers, {calibration['unparsable']} unreadable" in lines[-1]


def test_the_mark_stands_where_the_bar_would_end_if_confidence_were_right():
    bar = render_reliability_text(OVERCONFIDENT).plain.splitlines()[1][12:54]
    assert bar.count("█") == int(42 * 33 / 101)
    assert bar.index("┃") == int(42 * 0.95)
