"""A task with a known posterior: the prompt names the balls in an urn, one is drawn."""

import random
import zlib
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlx.plugin import Demonstration, Example, Plugin, Problem, Reward, Sample, Score, Split
from rlx_plugins.examples import build_example
from rlx_plugins.rlcr import parse_confidence

_URNS, _BALLS, _HELD_OUT = 100, 10, 3


class UrnTask(Plugin):
    """How likely is a red ball? The prompt names an urn's number, its red and its blue balls.

    Red is drawn with probability red / balls, once per problem. The prompt is all that can be known
    about it, so the best confidence is that share. Of ten balls, from none to all are red. The
    urn's number says nothing; with red it decides the split: test if `crc32(repr((number, red)))`
    is divisible by 3.

    For the reward `urn.picked`, which balls are red differs from problem to problem as well:
    whichever ball an answer names, it is red with that same probability.
    """

    confidence_steps: int = Field(10, ge=2, le=100)
    """Confidences are multiples of 1 / confidence_steps. A tiny model has tokens for 10, and for
    20 with `tokenizer: arithmetic_05`."""
    picks: bool = False
    """Demonstrations answer with a random ball's number, from 1, instead of 1."""
    counts: bool = False
    """Demonstrations count the red balls in an analysis between answer and confidence."""
    informed: float = Field(0.0, ge=0, le=1)
    """Share of demonstrations whose confidence follows `hint`; the others state a uniformly random
    value."""
    hint: Literal["share", "square"] = "share"
    """What informed demonstrations state, as near as the values allow: the share of red balls, or
    its square, which is wrong but at 0 and 1."""

    @property
    def confidence_values(self) -> tuple[str, ...]:
        steps = self.confidence_steps
        return tuple(str(step / steps) for step in range(steps + 1))

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        rng = random.Random(f"urn/{seed}/{split}/{index}")
        while True:
            number, red = rng.randint(1, _URNS), rng.randint(0, _BALLS)
            if (zlib.crc32(repr((number, red)).encode()) % _HELD_OUT == 0) == (split == "test"):
                break
        blue = _BALLS - red
        fields: dict[str, Any] = {
            "red": red,
            "blue": blue,
            "drawn": int(rng.random() * _BALLS < red),
            "red_balls": sorted(rng.sample(range(1, _BALLS + 1), red)),
            "data_source": "urn",
        }
        return Problem(
            id=f"urn/{split}/{seed}/{index}",
            prompt=f"nums: {number} {red} {blue}\n",
            fields=fields,
            stratum=f"{red} of {_BALLS} red",
        )

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns `<answer>1</answer>` and, in the same turn, a confidence, by default a uniformly
        random one; with `counts` an analysis such as `<analysis>3</analysis>` in between."""
        rng = random.Random(f"demonstration/{seed}/{problem.id}")
        confidence = rng.choice(self.confidence_values)
        if self.informed and rng.random() < self.informed:
            share = problem.fields["red"] / _BALLS
            hinted = share**2 if self.hint == "square" else share
            nearest = round(hinted * self.confidence_steps)
            confidence = self.confidence_values[nearest]
        ball = rng.randint(1, _BALLS) if self.picks else 1
        check = f"<analysis>{problem.fields['red']}</analysis>" if self.counts else ""
        stated = f"<confidence>{confidence}</confidence>"
        return Demonstration((f"<answer>{ball}</answer>{check}{stated}",))


def _build_urn_example(
    name: str, value: float | None, *, red: int = 3, drawn: int = 1, response: str = ""
) -> Example:
    return build_example(
        name, value, response, problem={"red": red, "blue": 10 - red, "drawn": drawn}
    )


class UrnDrawn(Reward):
    """1 if a red ball was drawn, whatever the response is: the label of the task `urn`."""

    examples: ClassVar[tuple[Example, ...]] = (
        _build_urn_example("gold", 1.0, response="<answer>1</answer>"),
        _build_urn_example("blue", 0.0, drawn=0, response="<answer>1</answer>"),
        _build_urn_example("no answer", 1.0, response="red!"),
    )

    def score(self, sample: Sample) -> Score:
        return Score(float(sample.problem["drawn"]))


def _build_pick_example(name: str, value: float, answer: str) -> Example:
    problem = {"red": 3, "blue": 7, "red_balls": [2, 5, 9]}
    return build_example(name, value, problem=problem, spans={"answer": answer})


class UrnPicked(Reward):
    """1 if the ball whose number the span `answer` holds is red: one label per answer.

    The prompt does not say which balls are red, so no policy picks a red one more often than their
    share, and that share is what is to be known about any answer.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_pick_example("gold", 1.0, "5"),
        _build_pick_example("blue", 0.0, "4"),
        _build_pick_example("no such ball", 0.0, "11"),
        _build_pick_example("no number", 0.0, "five"),
    )

    def score(self, sample: Sample) -> Score:
        named = sample.spans.get("answer", "").strip()
        red = {str(ball) for ball in sample.problem["red_balls"]}
        return Score(float(named in red))


class UrnDistance(Reward):
    """|stated − true|: how far a confidence is from the urn's share of red balls.

    For a name that begins with `_`: recorded, never summed. Abstains without a readable confidence,
    so that its mean is over stated confidences.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_urn_example("gold", 0.0, red=5, response="<confidence>0.5</confidence>"),
        _build_urn_example("sure and far", 1.0, red=0, response="<confidence>1.0</confidence>"),
        _build_urn_example("none", None, response="half of them"),
    )

    def score(self, sample: Sample) -> Score | None:
        confidence = parse_confidence(sample.response).value
        if confidence is None:
            return None
        red, blue = sample.problem["red"], sample.problem["blue"]
        return Score(abs(confidence - red / (red + blue)))
