"""What the scripts of the pages compute, against the same sums in Python."""

import json
import os
import shutil
import subprocess
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlx_web
from rlx_web.text import (
    BLANK,
    HIDDEN,
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


@given(st.text())
def test_visible_text_hides_nothing_and_keeps_the_rest(text):
    shown = render_visible_text(text)
    hidden = [c for c in shown if unicodedata.category(c) in HIDDEN and c != "\n"]
    assert hidden == []
    assert BLANK.search(shown) is None
    assert shown.count("\n") == text.count("\n")
    if text.isprintable() and not BLANK.search(text):
        assert shown == text
