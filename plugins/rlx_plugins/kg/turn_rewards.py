"""Rewards for single turns of the agent (after KG-R1, arXiv 2509.26383)."""

from typing import ClassVar

from rlx.plugin import Example, Reward, Sample, Score
from rlx_plugins.examples import build_example
from rlx_plugins.kg.protocol import is_well_formed

_FOUND = {"valid": True, "error": "KG_SUCCESS", "duplicate": False}
_UNKNOWN = {"valid": False, "error": "ENTITY_NOT_FOUND", "duplicate": False}


class QueryValidity(Reward):
    """1 for a new query that returned results, 0 for any other query; abstains on other turns.

    A repeated query earns nothing: to pay it again would encourage endless queries.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        build_example("gold", 1.0, turn="kg_query", info=_FOUND),
        build_example(
            "unknown name", 0.0, turn="kg_query", info=_UNKNOWN, reason="ENTITY_NOT_FOUND"
        ),
        build_example(
            "asked again",
            0.0,
            turn="kg_query",
            info=_FOUND | {"duplicate": True},
            reason="duplicate",
        ),
        build_example("an answer", None),
    )

    def score(self, sample: Sample) -> Score | None:
        if sample.turn != "kg_query":
            return None
        if not sample.info["valid"]:
            return Score(0.0, sample.info["error"])
        return Score(0.0, "duplicate") if sample.info["duplicate"] else Score(1.0)


class IsAnswer(Reward):
    """1 for an answer, right or wrong, 0 for a turn without an action; abstains on queries."""

    examples: ClassVar[tuple[Example, ...]] = (
        build_example("gold", 1.0),
        build_example(
            "no action",
            0.0,
            turn="invalid",
            info={"error": "INVALID_ACTION"},
            reason="INVALID_ACTION",
        ),
        build_example("a query", None, turn="kg_query", info=_FOUND),
    )

    def score(self, sample: Sample) -> Score | None:
        if sample.turn == "kg_query":
            return None
        return Score(1.0) if sample.turn == "answer" else Score(0.0, sample.info["error"])


class KgFormat(Reward):
    """1 if a whole turn is `<think>...</think>` and one action, each tag exactly once, else 0."""

    examples: ClassVar[tuple[Example, ...]] = (
        build_example("gold", 1.0, "<think> found</think><answer> Euro</answer>\n"),
        build_example("no reasoning", 0.0, "<answer> Euro</answer>", reason="format"),
        build_example("words behind it", 0.0, "<think></think><answer> Euro</answer> So!"),
        build_example(
            "both actions",
            0.0,
            "<think></think><kg-query>f( a)</kg-query><answer> Euro</answer>",
        ),
    )

    def score(self, sample: Sample) -> Score:
        return Score(1.0) if is_well_formed(sample.response) else Score(0.0, "format")
