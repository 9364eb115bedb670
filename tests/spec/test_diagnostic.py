"""Diagnostics as text."""

from dataclasses import replace

from rows import each_row

from rlx.errors import PluginError, SpecError
from rlx.spec.reading.diagnostics import (
    Diagnostic,
    InvalidPlugins,
    InvalidSpec,
    SourceLocation,
    build_refusal,
    did_you_mean,
    format_diagnostic,
    format_diagnostic_report,
)
from rlx.text import escape_unprintable

TYPO = Diagnostic(
    kind="unknown_key",
    message="unknown key 'algorithm.epsilom'",
    position=SourceLocation("experiments/rlcr.yaml", 7, 3, 7, "  epsilom: 0.2"),
    helps=("did you mean 'epsilon'?",),
)
PLUGIN = Diagnostic(kind="plugin", message="no reward plugin named 'briar'")


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


def test_the_specs_own_faults_decide_the_exit_code_before_plugins():
    both = build_refusal([PLUGIN, TYPO, TYPO], "f")
    assert (type(both), both.exit_code) == (InvalidSpec, 2)
    assert both.diagnostics == (TYPO, PLUGIN)
    alone = build_refusal([PLUGIN], "f")
    assert (type(alone), alone.exit_code) == (InvalidPlugins, 3)
    assert isinstance(alone, SpecError)
    assert isinstance(alone, PluginError)


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
    faults = [replace(PLUGIN, message=name, notes=("5 installed: a",)) for name in ("x", "y")]
    assert format_diagnostic_report(faults, "f.yaml").count("5 installed") == 1


def test_plain_text_is_left_alone():
    assert escape_unprintable("σ ≥ 0.5 → ok") == "σ ≥ 0.5 → ok"
    assert escape_unprintable("a\ufe0f\u3164\u2800b") == r"a\ufe0f\u3164\u2800b", "drawn as nothing"
