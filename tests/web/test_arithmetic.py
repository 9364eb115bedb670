"""What the scripts of the pages compute, against the same sums in Python."""

import json
import math
import os
import random
import shutil
import subprocess
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlx_web
from rlx_web.text import (
    BLANK,
    HIDDEN,
    build_sparkline_points,
    format_byte_size,
    format_duration,
    format_figure,
    get_heat_class,
    render_visible_text,
)

STATIC = Path(rlx_web.__file__).parent / "static"
needs_node = pytest.mark.skipif(
    shutil.which("node") is None and os.environ.get("RLX_CI") != "1",  # which fails instead
    reason="needs node to run the pages' arithmetic: apt-get install nodejs",
)
ODD = [
    "plain", "two\nlines", "\x00\x1b[31m\x7f", "\u202eabc\u2069", "\u200b\ufeff", "é漢😀",
    "\U000e0041", "\x85\x9b", "\ud800", "\u2028\u2029", "a\u0301" * 9, "\ue000", "\t\r",
]  # fmt: skip
UNSEEN = (
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180d\u180f\u2800\u3164"
    "\ufe00\ufe0f\uffa0\U000e0100\U000e01ef"
)
"""Letters and marks that are drawn as nothing."""
BESIDE = "\u034e\u0350\u17b3\u2801\u3165\ufdf0\ufe10\uff9f"
"""Their neighbours, which are seen."""


def node(module, expression, given):
    """What an expression over `given`, and what a module exports, comes to."""
    script = f"""
import * as m from {json.dumps((STATIC / module).as_uri())};
import {{ readFileSync }} from "node:fs";
const given = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify({expression}));
"""
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script],
        input=json.dumps(given), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def curves(count):
    """Curves of every length, steps ascending, values of every size."""
    draw = random.Random(0)
    sizes = [1, 2, 3, *(draw.randrange(1, 60) for _ in range(count - 3))]
    return [
        [
            [step, draw.choice([0.0, -1.0, draw.uniform(-1, 1) * 10 ** draw.randrange(-9, 9)])]
            for step in sorted(draw.sample(range(200), size))
        ]
        for size in sizes
    ]


@needs_node
def test_ticks_are_few_round_and_inside():
    draw = random.Random(1)
    ends = [(0, 1), (-0.03, 0.11), (5, 5), (0, 230), (3, 2)]
    ends += [tuple(sorted(draw.uniform(-1, 1) * 10**e for _ in "ab")) for e in range(-12, 13)] * 4
    found = node("chart.js", "given.map(([a, b]) => m.ticks(a, b))", ends)
    assert found[:4] == [[0, 0.25, 0.5, 0.75, 1], [0, 0.05, 0.1], [5], [0, 100, 200]]
    for (low, high), marks in zip(ends[5:], found[5:], strict=True):
        slack = 1e-6 * (high - low)
        assert 2 <= len(marks) <= 6, (low, high, marks)
        assert all(low - slack <= mark <= high + slack for mark in marks)
        sizes = [b - a for a, b in pairwise(marks)]
        assert sizes == pytest.approx([sizes[0]] * len(sizes))
        digits = sizes[0] / 10 ** math.floor(math.log10(sizes[0]) + 1e-9)
        assert min(abs(digits - round_) for round_ in (1, 2, 2.5, 5, 10)) < 1e-6


@needs_node
def test_scale_is_linear_and_of_one_value_the_middle():
    cases = [(0, 2, 10, 20, 1), (3, 3, 10, 20, 3), (-1, 1, 100, 0, 0.5), (0, 4, 0, 1, 9)]
    expression = "given.map(([a, b, from, to, v]) => m.scale(a, b, from, to)(v))"
    assert node("chart.js", expression, cases) == [15, 15, 25, 2.25]


@needs_node
@pytest.mark.parametrize("weight", [0, 0.3, 0.98])
def test_smoothing_is_a_weighted_mean_of_what_came_before(weight):
    given_ = curves(20)
    found = node("chart.js", f"given.map((c) => m.smoothed(c, {weight}))", given_)
    for curve, smooth in zip(given_, found, strict=True):
        assert [x for x, _ in smooth] == [x for x, _ in curve]
        for i, (_, y) in enumerate(smooth):
            weights = [weight ** (i - j) for j in range(i + 1)]
            mean = sum(w * curve[j][1] for j, w in enumerate(weights)) / sum(weights)
            assert y == pytest.approx(mean, rel=1e-9, abs=1e-6)


@needs_node
def test_bounds_are_those_of_every_curve():
    given_ = [curves(3), curves(9), [[[4, -2.5]]]]
    for some, box in zip(given_, node("chart.js", "given.map(m.bounds)", given_), strict=True):
        xs, ys = zip(*(point for curve in some for point in curve), strict=True)
        assert box == [min(xs), max(xs), min(ys), max(ys)]


@needs_node
def test_the_nearest_point_and_of_two_as_near_the_earlier():
    given_ = [[curve, x] for curve in curves(12) for x in (-5, 0, 17, 99.5, 100, 300)]
    found = node("chart.js", "given.map(([c, x]) => m.nearest(c, x))", given_)
    for (curve, x), point in zip(given_, found, strict=True):
        assert point == min(curve, key=lambda p: (abs(p[0] - x), p[0]))


@needs_node
def test_news_go_behind_and_a_step_again_replaces_itself():
    given_ = [[old, new] for old, new in zip(curves(9), reversed(curves(9)), strict=True)]
    found = node("chart.js", "given.map(([a, b]) => m.merged(a, b))", given_)
    for (old, new), points in zip(given_, found, strict=True):
        assert points == [list(p) for p in sorted({**dict(old), **dict(new)}.items())]


@needs_node
def test_figures_are_written_as_on_the_server():
    values = [0, 0.25, 1.0, -0.5, 0.123456, 1234.5678, 99999.0, 1e-4, 12346.0, -3.0]
    assert [float(s) for s in node("chart.js", "given.map(m.number)", values)] == [
        float(format_figure(float(v))) for v in values
    ]
    odd = [None, "nan", "-inf", -2e-7, 1e6, 123456]
    assert node("chart.js", "given.map(m.number)", odd) == [
        "—", "nan", "-inf", "-2.00e-7", "1.00e+6", "123500",
    ]  # fmt: skip


@needs_node
def test_text_is_made_visible_as_on_the_server():
    given_ = [*ODD, UNSEEN, BESIDE]
    found = node("chart.js", "given.map(m.visible)", given_)
    assert found == [render_visible_text(text, "⏎\n") for text in given_]


@needs_node
def test_stretches_of_time_are_written_as_on_the_server():
    seconds = [None, 0, 0.4, 59, 60, 90, 3599, 3600, 86399, 86400, 1e6]
    assert node("live.js", "given.map(m.lasting)", seconds) == [format_duration(s) for s in seconds]


@needs_node
def test_shades_are_those_of_the_server(tmp_path):
    """The page colours a token first; the script colours it the same."""
    source = (STATIC / "credit.js").read_text()
    start = source.index("export function shade")
    (tmp_path / "shade.mjs").write_text(
        "const SHADES = 8;\n" + source[start : source.index("\n}\n", start) + 3]
    )
    values = [None, 0, 1.0, -1.0, 0.3, -1.9, 0.125, 0.1251, -0.01, 2.0, "nan", 1e-300]
    given_ = [[value, largest] for value in values for largest in (0.0, 2.0)]
    found = node(str(tmp_path / "shade.mjs"), "given.map(([v, l]) => m.shade(v, l))", given_)
    assert found == [get_heat_class(v, [{"name": "a", "largest": top}], "a") for v, top in given_]
    assert {"p4", "n4", "p1", "n1", "p2", "p8", "n8", ""} == set(found)


# In Python alone ---------------------------------------------------------------------------------


@given(st.text())
def test_visible_text_hides_nothing_and_keeps_the_rest(text):
    shown = render_visible_text(text)
    hidden = [c for c in shown if unicodedata.category(c) in HIDDEN and c != "\n"]
    assert hidden == []
    assert BLANK.search(shown) is None
    assert shown.count("\n") == text.count("\n")
    if text.isprintable() and not BLANK.search(text):
        assert shown == text


def test_what_cannot_be_seen_is_named():
    text = "\x00\x1b\x7f\x85\u202e\u2069\u200b\ud800\U000e0041\u2028"
    assert render_visible_text(text) == (
        "␀␛␡⟨U+0085⟩⟨U+202E⟩⟨U+2069⟩⟨U+200B⟩⟨U+D800⟩⟨U+E0041⟩⟨U+2028⟩"
    )


def test_letters_that_are_drawn_as_nothing_are_named():
    assert render_visible_text(UNSEEN) == "".join(f"⟨U+{ord(c):04X}⟩" for c in UNSEEN)
    assert render_visible_text(BESIDE) == BESIDE


def test_a_sparkline_fills_its_frame():
    assert build_sparkline_points([(0, 1.0), (10, 3.0), (20, 2.0)]) == "2.0,18.0 48.0,2.0 94.0,10.0"
    assert build_sparkline_points([(7, 1.0)]) == "2.0,18.0"
    assert build_sparkline_points([(0, 5.0), (1, 5.0)]) == "2.0,18.0 94.0,18.0"


def test_sizes_and_stretches():
    assert [format_byte_size(n) for n in (None, 0, 1023, 1024, 2**20 * 1.5, 2**40 * 3)] == [
        "0 B", "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "3.0 TiB",
    ]  # fmt: skip
    assert [format_duration(s) for s in (None, 5, 90, 5400, 2 * 86400)] == [
        "—", "5 s", "1.5 min", "1.5 h", "2.0 d",
    ]  # fmt: skip
