"""Diagnostics as text."""

from rows import each_row

from rlx.spec.reading.diagnostics import (
    Diagnostic,
    SourceLocation,
    did_you_mean,
    format_diagnostic,
    format_diagnostic_report,
)
from rlx.text import escape_unprintable


def test_nothing_in_a_file_reaches_the_terminal_as_a_command():
    evil = "a: \x1b]0;owned\x07 \u202e\x9b31m"
    place = SourceLocation("f\x1b[2J.yaml", 1, 4, 2, evil)
    text = format_diagnostic(Diagnostic(kind="value", message=evil, position=place, helps=(evil,)))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\\x1b]0;owned\\x07" in text


def test_carets_stand_below_wide_and_escaped_characters():
    place = SourceLocation("f", 1, 5, 2, "確: \x1b界x")
    *_, line, carets = format_diagnostic(
        Diagnostic(kind="value", message="m", position=place)
    ).splitlines()
    assert line == " 1 | 確: \\x1b界x"
    assert carets == "   | " + " " * 8 + "^^^"


@each_row(
    ("word", "choices", "meant"),
    [
        ("acuracy", ["format", "accuracy"], "accuracy"),
        ("Tiny", ["tiny"], "tiny"),
        ("zebra", ["format", "accuracy"], None),
        ("gpu", ["auto", "cpu", "cuda"], "cuda"),
        ("cuda:0", ["auto", "cpu", "cuda"], "cuda"),
        ("cosine_restarts", ["constant", "linear", "cosine"], "cosine"),
        ("bf16", ["float32", "bfloat16"], "bfloat16"),
        ("gpu", ["gpus"], "gpus"),
    ],
)
def test_the_nearest_name_is_suggested(word, choices, meant):
    assert did_you_mean(word, choices) == meant


def test_a_report_has_a_note_once():
    faults = [Diagnostic(kind="plugin", message=m, notes=("5 installed: a",)) for m in "xy"]
    assert format_diagnostic_report(faults, "f.yaml").count("5 installed") == 1


def test_plain_text_is_left_alone():
    assert escape_unprintable("σ ≥ 0.5 → ok") == "σ ≥ 0.5 → ok"
    assert escape_unprintable("a\ufe0f\u3164\u2800b") == r"a\ufe0f\u3164\u2800b", "drawn as nothing"
