import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import each_row

from rlx.plugin import Sample
from rlx.rollout import find_spans
from rlx_plugins.answers import AnswerExactMatch
from rlx_plugins.rlcr import (
    Brier,
    ProperScore,
    RlcrFormat,
    StatedConfidence,
    matches_pattern,
    parse_confidence,
)

GOLDEN = Path(__file__).parents[1] / "golden"
N = 200_000


def sample(response, of=None):
    return Sample(id="a", problem={}, turn="confidence", number=2, response=response, of=of)


def confidence(text):
    return f"<confidence>{text}</confidence>"


@each_row(
    ("text", "value"),
    [
        (confidence("0.7"), 0.7),
        (confidence(" 1 \n"), 1.0),
        (confidence("-0"), 0.0),
        (confidence("0.1") + " or " + confidence("0.9"), 0.9),
        ("I think so.\n" + confidence("0.3") + "\n<|im_end|>", 0.3),
        (confidence("0." + "3" * 5000), 1 / 3),
    ],
)
def test_confidences_that_can_be_read(text, value):
    read = parse_confidence(text)
    assert read.value == pytest.approx(value)
    assert math.copysign(1, read.value) == 1
    assert read.reason is None


@each_row(
    ("text", "reason"),
    [
        ("", "no confidence"),
        ("0.7", "no confidence"),
        ("<confidence>0.7", "no confidence"),
        ("0.7</confidence>", "no confidence"),
        (confidence(""), "unparsable"),
        (confidence("1e-1"), "unparsable"),
        (confidence("0.5_0"), "unparsable"),
        (confidence("٠.٥"), "unparsable"),
        (confidence("<confidence>0.5"), "unparsable"),
        (confidence("0.5\u00a0"), "unparsable"),
        (confidence("."), "unparsable"),
        (confidence("nan"), "not finite"),
        (confidence("-NaN"), "not finite"),
        (confidence("-Infinity"), "not finite"),
        (confidence("1.2"), "out of range"),
        (confidence("9" * 5000), "out of range"),
        (confidence("0.5") + confidence("80"), "out of range"),
    ],
)
def test_confidences_that_cannot_be_read(text, reason):
    assert parse_confidence(text) == (None, reason)
    score = Brier().score(sample(text, of=1.0))
    assert (score.value, score.reason, score.parts) == (0.0, reason, {})
    assert StatedConfidence().score(sample(text)) is None


@given(st.text())
def test_whatever_is_read_is_a_probability(text):
    for response in (text, confidence(text)):
        value, reason = parse_confidence(response)
        assert (value is None) == (reason is not None)
        assert value is None or 0 <= value <= 1


@each_row("of", [None, math.nan, -0.1, 1.1])
def test_a_parent_that_is_no_probability_is_not_the_models_fault(of):
    with pytest.raises(ValueError, match="of"):
        Brier().score(sample(confidence("0.5"), of=of))


@each_row(
    ("text", "value", "extreme"),
    [
        ("0.7", 0.7, 0.0),
        ("1", 1.0, 1.0),
        ("0.99", 0.99, 1.0),
        ("0.98", 0.98, 0.0),
        ("0.01", 0.01, 1.0),
        ("0.02", 0.02, 0.0),
        ("0", 0.0, 1.0),
    ],
)
def test_a_stated_confidence_is_its_own_value(text, value, extreme):
    score = StatedConfidence().score(sample(confidence(text)))
    assert (score.value, score.parts) == (value, {"confidence": value, "extreme": extreme})


EXPRESSIONS = {
    "ta": r".*?</think>\s*<answer>.*?</answer>\s*\Z",
    "tac": r".*?</think>\s*<answer>.*?</answer>\s*<confidence>.*?</confidence>\s*\Z",
    "tabc": r".*?</think>\s*<answer>.*?</answer>\s*<analysis>.*?</analysis>"
    r"\s*<confidence>.*?</confidence>\s*\Z",
    "tbac": r".*?</think>\s*<analysis>.*?</analysis>\s*<answer>.*?</answer>"
    r"\s*<confidence>.*?</confidence>\s*\Z",
    "c": r"\s*<confidence>.*?</confidence>\s*\Z",
    "bc": r"\s*<analysis>.*?</analysis>\s*<confidence>.*?</confidence>\s*\Z",
}
GOOD = {
    "ta": "<think>a</think> <answer>b</answer>\n",
    "tac": "a</think><answer>b</answer><confidence>1</confidence>",
    "tabc": "a</think><answer>b</answer>\n<analysis>x\ny</analysis><confidence>1</confidence>",
    "tbac": "a</think><analysis>x</analysis> <answer>b</answer><confidence>1</confidence>",
    "c": "\n<confidence>1</confidence> ",
    "bc": "<analysis>x</analysis><confidence>1</confidence>",
}
PIECES = st.sampled_from(
    [
        f"<{slash}{tag}>"
        for tag in ("think", "answer", "analysis", "confidence")
        for slash in ("", "/")
    ]
    + ["x", " ", "\n", "\u00a0", "<"]
)


@pytest.mark.parametrize("pattern", EXPRESSIONS)
@settings(max_examples=150)
@given(data=st.data())
def test_forms_equal_the_regular_expressions(pattern, data):
    # Pieces of a right response, with some left out or put in between.
    parts = re.findall(r"<[^>]*>|[^<]+", GOOD[pattern])
    parts = [p for part in parts for p in (part, data.draw(st.one_of(st.just(""), PIECES)))]
    parts = [p for p in parts if data.draw(st.integers(0, 9))]
    text = "".join(parts)
    assert matches_pattern(pattern, text) == bool(re.match(EXPRESSIONS[pattern], text, re.DOTALL))


@each_row(
    ("text", "reason", "patterns"),
    [
        ("</think>" * (N // 8), "no confidence", []),
        ("</think>" + " " * N, "no confidence", []),
        ("</think><answer>" * (N // 15) + "</answer>", "no confidence", ["ta"]),
        ("</think><answer></answer>" * (N // 25) + "x", "no confidence", []),
        ("<confidence>" * (N // 12), "no confidence", []),
        ("<confidence>" * (N // 12) + "</confidence>", "unparsable", []),
        ("</confidence>" * (N // 13), "no confidence", []),
        ("<analysis></analysis>" * (N // 21) + "</confidence>", "no confidence", []),
        (confidence("1" * N), "out of range", []),
        (" " * N, "no confidence", []),
        ("</answer>" + " " * N + "x</confidence>", "no confidence", []),
    ],
)
def test_hostile_text_has_no_confidence_and_the_format_of_the_expressions(text, reason, patterns):
    assert parse_confidence(text) == (None, reason)
    formats = {pattern: RlcrFormat(pattern=pattern) for pattern in EXPRESSIONS}
    assert [p for p, reward in formats.items() if reward.score(sample(text)).value] == patterns


RESPONSES = json.loads((GOLDEN / "rlcr.json").read_text())["responses"]


@each_row("pattern", ["ta", "tac", "tabc", "tbac"])
def test_the_coupled_recipe_scores_as_rlcrs_own_functions_do(pattern):
    """Format, accuracy and Brier of each response to a problem whose answer is 42, the last two 0
    where the format is wrong, as by `requires: format`."""
    responses = [entry for entry in RESPONSES if entry["pattern"] == pattern]
    assert len(responses) > 20
    for entry in responses:
        text = entry["response"] or " "
        spans = find_spans(text, range(1, len(text) + 1), ("answer",))
        given = {"problem": {"answer": "42"}, "spans": {n: s.text for n, s in spans.items()}}
        said = replace(sample(text), **given)
        right = AnswerExactMatch(normalize="text").score(said).value
        found = {"format": RlcrFormat(pattern=pattern).score(said).value}
        gated = {"accuracy": right, "brier": Brier().score(replace(said, of=right)).value}
        if "c" not in pattern:  # theirs finds no confidence and gives 0; nobody asks for it
            gated["brier"] = entry["brier"]
        found |= gated if found["format"] else dict.fromkeys(gated, 0.0)
        assert found == pytest.approx({name: entry[name] for name in found}), entry


@each_row(
    ("rule", "stated", "of", "value"),
    [
        ("log", "0.1", 1.0, 2 / 3),
        ("log", "0.9", 0.0, 2 / 3),
        ("log", "0", 1.0, 0.0),
        ("spherical", "0.6", 1.0, 0.6 / math.hypot(0.6, 0.4)),
        ("brier", "0.3", 1.0, 0.51),
        ("brier", "0.3", 0.5, (0.51 + 0.91) / 2),
    ],
)
def test_proper_scores(rule, stated, of, value):
    said = sample(confidence(stated), of)
    assert ProperScore(rule=rule).score(said).value == pytest.approx(value)
