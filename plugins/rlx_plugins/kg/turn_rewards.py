"""Rewards for single turns of the agent (after KG-R1, arXiv 2509.26383)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from rlx.plugin import Example, Reward, Sample, Score
from rlx_plugins.kg.protocol import is_well_formed

_FOUND = {"valid": True, "error": "KG_SUCCESS", "duplicate": False}
_UNKNOWN = {"valid": False, "error": "ENTITY_NOT_FOUND", "duplicate": False}
_AGAIN = _FOUND | {"duplicate": True}
_INVALID = {"error": "INVALID_ACTION"}


def _build_turn_example(
    name: str,
    kind: str,
    value: float | None,
    text: str = "",
    *,
    info: Mapping[str, Any] = MappingProxyType({}),
    reason: str | None = None,
    **options: Any,
) -> Example:
    sample = Sample(id="a", problem={}, turn=kind, number=1, response=text, info=dict(info))
    return Example(name=name, sample=sample, value=value, reason=reason, options=options)


class QueryValidity(Reward):
    """1 for a query that returned results, 0 for any other query; abstains on other turns."""

    examples: ClassVar[tuple[Example, ...]] = (
        _build_turn_example("gold", "kg_query", 1.0, info=_FOUND),
        _build_turn_example(
            "unknown name", "kg_query", 0.0, info=_UNKNOWN, reason="ENTITY_NOT_FOUND"
        ),
        _build_turn_example("asked again", "kg_query", 0.0, info=_AGAIN, reason="duplicate"),
        _build_turn_example(
            "asked again, and paid", "kg_query", 1.0, info=_AGAIN, count_duplicates=True
        ),
        _build_turn_example("an answer", "answer", None),
    )

    count_duplicates: bool = False
    """Whether a repeated query earns the reward again; true encourages endless queries."""

    def score(self, sample: Sample) -> Score | None:
        """Judges one turn."""
        if sample.turn != "kg_query":
            return None
        info = sample.info
        if not info["valid"]:
            return Score(0.0, info["error"])
        if info["duplicate"] and not self.count_duplicates:
            return Score(0.0, "duplicate")
        return Score(1.0)


class IsAnswer(Reward):
    """1 for an answer, right or wrong, 0 for a turn without an action; abstains on queries."""

    examples: ClassVar[tuple[Example, ...]] = (
        _build_turn_example("gold", "answer", 1.0),
        _build_turn_example("no action", "invalid", 0.0, info=_INVALID, reason="INVALID_ACTION"),
        _build_turn_example("a query", "kg_query", None, info=_FOUND),
    )

    def score(self, sample: Sample) -> Score | None:
        """Judges one turn."""
        if sample.turn == "kg_query":
            return None
        return Score(1.0) if sample.turn == "answer" else Score(0.0, sample.info["error"])


class KgFormat(Reward):
    """1 if a whole turn is `<think>...</think>` and one action, each tag exactly once, else 0."""

    examples: ClassVar[tuple[Example, ...]] = (
        _build_turn_example("gold", "answer", 1.0, "<think> found</think><answer> Euro</answer>\n"),
        _build_turn_example(
            "gold, a query", "kg_query", 1.0, "<think></think> <kg-query>f( a)</kg-query>"
        ),
        _build_turn_example(
            "no reasoning", "answer", 0.0, "<answer> Euro</answer>", reason="format"
        ),
        _build_turn_example(
            "words behind it", "answer", 0.0, "<think></think><answer> Euro</answer> So!"
        ),
        _build_turn_example(
            "both actions",
            "answer",
            0.0,
            "<think></think><kg-query>f( a)</kg-query><answer> Euro</answer>",
        ),
        _build_turn_example(
            "tags without end", "answer", 0.0, "<think></think><answer>" * 5_000 + "</answer>"
        ),
    )

    def score(self, sample: Sample) -> Score:
        """Judges one turn."""
        return Score(1.0) if is_well_formed(sample.response) else Score(0.0, "format")
