"""Rewards of RLCR (arXiv 2507.16806): the Brier score of a stated confidence, and the format."""

import math
import re
from typing import ClassVar, Literal, NamedTuple, get_args

from rlx.plugin import Example, Reward, Sample, Score, get_last_block
from rlx_plugins.examples import build_example

_number = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)").fullmatch
_not_finite = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE | re.ASCII).fullmatch


class ParsedConfidence(NamedTuple):
    """A parsed confidence: `value` in [0, 1], or None with a `reason`."""

    value: float | None
    reason: str | None = None


def parse_confidence(text: str) -> ParsedConfidence:
    """Parses the last `<confidence>…</confidence>` block of a response.

    The block must contain one plain decimal number in ASCII digits: no exponent, no percent sign.
    The reasons are "no confidence", "unparsable", "not finite" and "out of range".
    """
    block = get_last_block(text, "<confidence>", "</confidence>")
    if block is None:
        return ParsedConfidence(None, "no confidence")
    content = block.strip(" \t\r\n")
    if _not_finite(content):
        return ParsedConfidence(None, "not finite")
    if not _number(content):
        return ParsedConfidence(None, "unparsable")
    value = float(content)
    if not 0.0 <= value <= 1.0:
        return ParsedConfidence(None, "out of range")
    return ParsedConfidence(abs(value))  # "-0" is 0


def _build_confidence_example(
    name: str, response: str, value: float | None, of: float | None = None, reason: str = ""
) -> Example:
    return build_example(name, value, response, reason=reason or None, turn="confidence", of=of)


def _read_judgement(sample: Sample) -> tuple[float, ParsedConfidence]:
    of = sample.of
    if of is None or not 0.0 <= of <= 1.0:
        raise ValueError(f"the reward named by `of` must lie in [0, 1], got {of}")
    return of, parse_confidence(sample.response)


class Brier(Reward):
    """1 - (of - c)² for the stated confidence c; `of` names the reward for correctness.

    Its expectation is greatest at c = P(right). Without a valid confidence it is 0, which is also
    the worst valid score. RLCR's code accepts `nan`; here a confidence must be finite.
    """

    reads_parent: ClassVar[bool] = True
    examples: ClassVar[tuple[Example, ...]] = (
        _build_confidence_example("gold, right", "<confidence>1</confidence>", 1.0, of=1.0),
        _build_confidence_example("gold, wrong", "<confidence>0</confidence>", 1.0, of=0.0),
        _build_confidence_example("unsure", "<confidence>0.3</confidence>", 0.51, of=1.0),
        _build_confidence_example("sure and wrong", "<confidence>1.0</confidence>", 0.0, of=0.0),
        _build_confidence_example("none", "I am sure", 0.0, of=1.0, reason="no confidence"),
        _build_confidence_example(
            "not finite", "<confidence>nan</confidence>", 0.0, of=1.0, reason="not finite"
        ),
    )

    def score(self, sample: Sample) -> Score:
        of, (confidence, reason) = _read_judgement(sample)
        if confidence is None:
            return Score(0.0, reason)
        return Score(1.0 - (of - confidence) ** 2, parts={"confidence": confidence})


_LEAST = 0.001


class ProperScore(Reward):
    """A proper score of the stated confidence c; `of` names the reward for correctness, y.

    Each lies between 0 and 1, and its expectation is greatest at c = P(right). With p = c for a
    right answer and 1 - c for a wrong one: log is 1 - ln max(p, .001) / ln .001, spherical is
    p / √(c² + (1 - c)²), brier is 1 - (1 - p)². Between 0 and 1, y weighs both outcomes, where
    `rlcr.brier` measures the distance from y. After Gneiting and Raftery, "Strictly proper scoring
    rules, prediction, and estimation", 2007.
    """

    reads_parent: ClassVar[bool] = True
    examples: ClassVar[tuple[Example, ...]] = (
        _build_confidence_example("gold, right", "<confidence>1</confidence>", 1.0, of=1.0),
        _build_confidence_example("gold, wrong", "<confidence>0</confidence>", 1.0, of=0.0),
        _build_confidence_example("sure and wrong", "<confidence>1</confidence>", 0.0, of=0.0),
        _build_confidence_example("none", "I am sure", 0.0, of=1.0, reason="no confidence"),
    )

    rule: Literal["log", "spherical", "brier"] = "log"
    """Which score."""

    def score(self, sample: Sample) -> Score:
        of, (confidence, reason) = _read_judgement(sample)
        if confidence is None:
            return Score(0.0, reason)
        value = of * self._score_right(confidence) + (1 - of) * self._score_right(1 - confidence)
        return Score(value, parts={"confidence": confidence})

    def _score_right(self, p: float) -> float:
        match self.rule:
            case "log":
                return 1 - math.log(max(p, _LEAST)) / math.log(_LEAST)
            case "spherical":
                return p / math.hypot(p, 1 - p)
            case "brier":
                return 1 - (1 - p) ** 2


class PassOn(Reward):
    """The value that `of` names, unchanged.

    With `over: below`, a turn is paid the mean of what the turns below it earn.
    """

    reads_parent: ClassVar[bool] = True
    examples: ClassVar[tuple[Example, ...]] = (
        _build_confidence_example("gold", "17=17", 0.75, of=0.75),
        _build_confidence_example("nothing", "", 0.0, of=0.0),
        _build_confidence_example("no turn below has it", "17=17", None),
    )

    def score(self, sample: Sample) -> Score | None:
        return None if sample.of is None else Score(sample.of)


class StatedConfidence(Reward):
    """The stated confidence itself, for a name that begins with `_`: logged, never summed.

    Abstains if none can be parsed, so that means are over stated confidences. The part `extreme` is
    1 for confidences within 0.01 of 0 or 1; its mean is the share of such confidences.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_confidence_example("gold", "<confidence>0.7</confidence>", 0.7),
        _build_confidence_example("none", "sure", None),
    )

    def score(self, sample: Sample) -> Score | None:
        confidence = parse_confidence(sample.response).value
        if confidence is None:
            return None
        extreme = not 0.01 < confidence < 0.99
        return Score(confidence, parts={"confidence": confidence, "extreme": float(extreme)})


Pattern = Literal["ta", "tac", "tabc", "tbac", "ac", "abc", "c", "bc"]

_TAGS = {"a": "answer", "b": "analysis", "c": "confidence"}


def _build_joint_patterns(pattern: Pattern) -> tuple[list[re.Pattern[str]], str]:
    """The pattern that opens each block, in order, and the tag that closes the last."""
    before, joints = "</think>" if pattern[0] == "t" else "", []
    for letter in pattern.removeprefix("t"):
        joints.append(re.compile(rf"{before}\s*<{_TAGS[letter]}>"))
        before = f"</{_TAGS[letter]}>"
    return joints, before


_PATTERNS = {name: _build_joint_patterns(name) for name in get_args(Pattern)}


def matches_pattern(pattern: Pattern, text: str) -> bool:
    """Whether a whole response has a format of t(hink), a(nswer), b for analysis, c(onfidence).

    Equals a match of RLCR's regular expressions, such as
    `.*?</think>\\s*<answer>.*?</answer>\\s*\\Z` for `ta`, which take polynomial time on adversarial
    text: the first match of each joint after the previous one is equivalent. `<think>` itself may
    be in the prompt; patterns without t allow nothing before their first tag.
    """
    joints, closing = _PATTERNS[pattern]
    end = len(text.rstrip()) - len(closing)
    if end < 0 or not text.startswith(closing, end):
        return False
    position = 0
    for number, joint in enumerate(joints):
        anchored = number == 0 and pattern[0] != "t"
        found = (joint.match if anchored else joint.search)(text, position, end)
        if not found:
            return False
        position = found.end()
    return True


def _build_format_example(name: str, pattern: Pattern, response: str, value: float) -> Example:
    return build_example(name, value, response, options={"pattern": pattern})


class RlcrFormat(Reward):
    """1 if the whole response has the format `pattern`, else 0.

    A pattern with a confidence asks for one that `parse_confidence` reads, a number in [0, 1].
    RLCR's code does the same, but reads it by `float`, which accepts `nan`, `1e-1` and `0.5_0`.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_format_example("gold", "ta", "<think>6*7</think>\n<answer>42</answer>\n", 1.0),
        _build_format_example("gold, a confidence", "c", "<confidence>0.5</confidence>", 1.0),
        _build_format_example(
            "words after it", "ta", "<think>6*7</think><answer>42</answer> So!", 0.0
        ),
        _build_format_example("nothing closed", "ta", "<think>6*7<answer>42", 0.0),
        _build_format_example(
            "in words",
            "tac",
            "<think>6*7</think><answer>42</answer><confidence>maybe</confidence>",
            0.0,
        ),
    )

    pattern: Pattern
    """Blocks in order: t for think, a for answer, b for analysis, c for confidence."""

    def score(self, sample: Sample) -> Score:
        if not matches_pattern(self.pattern, sample.response):
            return Score(0.0, f"not of the form {self.pattern}")
        if "c" in self.pattern:
            confidence, reason = parse_confidence(sample.response)
            if confidence is None:
                return Score(0.0, f"confidence: {reason}")
        return Score(1.0)
