"""Rewards of every scope, with examples that `rlx plugins check` verifies."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, ClassVar

from pydantic import Field

from rlx.plugin import Example, Reward, Sample, Scope, Score, reward


def _build_span_samples(span: str, *texts: str | None) -> tuple[Sample, ...]:
    """Samples with these texts in a span; None means no such span."""
    return tuple(
        Sample(
            id=f"{i}",
            problem={},
            turn="answer",
            number=1,
            response=text or "",
            spans={} if text is None else {span: text},
        )
        for i, text in enumerate(texts)
    )


class Distinct(Reward):
    """Rarity of an answer among all answers to its prompt: 1 if unique, 1/n if n answers agree.

    The sum over a group is the number of distinct answers, which rewards variety. A response
    without the span scores 0.
    """

    scope: ClassVar[Scope] = "group"
    examples: ClassVar[tuple[Example, ...]] = (
        Example(
            name="two agree",
            sample=_build_span_samples("answer", "1+2", " 1+2", "2+1"),
            value=(0.5, 0.5, 1.0),
        ),
        Example(
            name="no answer", sample=_build_span_samples("answer", "3", None), value=(1.0, 0.0)
        ),
        Example(name="all alike", sample=_build_span_samples("answer", *"7777"), value=(0.25,) * 4),
        Example(name="empty", sample=_build_span_samples("answer", "", "\0"), value=(1.0, 1.0)),
    )

    span: str = "answer"
    """The span to compare, without surrounding white space."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores all answers to one prompt."""
        answers = [s.spans[self.span].strip() if self.span in s.spans else None for s in samples]
        often = Counter(answers)
        return [
            Score(0.0, f"no {self.span}") if answer is None else Score(1.0 / often[answer])
            for answer in answers
        ]


class Consensus(Reward):
    """1 - |c - mean of the siblings' c| for a stated number c; siblings continue the same turn.

    Turns without a number score 0 and do not count for the mean.
    """

    scope: ClassVar[Scope] = "siblings"
    examples: ClassVar[tuple[Example, ...]] = (
        Example(
            name="agreed", sample=_build_span_samples("confidence", "0.5", ".5"), value=(1.0, 1.0)
        ),
        Example(
            name="apart",
            sample=_build_span_samples("confidence", "0", "1", "no idea"),
            value=(0.5, 0.5, 0.0),
        ),
        Example(
            name="no number",
            sample=_build_span_samples("confidence", "nan", "-inf", "9" * 400, None),
            value=(0.0,) * 4,
        ),
    )

    span: str = "confidence"
    """The span that contains the number, which must be between 0 and 1."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores all siblings."""
        stated = [_parse_share(sample.spans.get(self.span, "")) for sample in samples]
        known = [number for number in stated if number is not None]
        mean = fmean(known) if known else 0.0
        return [
            Score(0.0, "no number") if number is None else Score(1.0 - abs(number - mean))
            for number in stated
        ]


def _parse_share(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0.0 <= number <= 1.0 else None


def _build_info_sample(**info: object) -> Sample:
    return Sample(id="0", problem={}, turn="query", number=2, response="<query/>", info=info)


@reward(
    examples=[
        Example(name="gold", sample=_build_info_sample(errors=0), value=1.0),
        Example(
            name="one error", sample=_build_info_sample(errors=1), value=0.5, reason="1 errors"
        ),
        Example(
            name="too many", sample=_build_info_sample(errors=9), value=0.0, options={"most": 3}
        ),
        Example(name="no environment", sample=_build_info_sample(), value=None),
    ]
)
def few_errors(
    sample: Sample,
    *,
    key: Annotated[str, Field(description="What the environment calls its count.")] = "errors",
    most: Annotated[int, Field(ge=1, description="More of them earn nothing.")] = 2,
) -> Score | None:
    """1 without tool errors, falling to 0 at `most`; abstains without an environment."""
    if key not in sample.info:
        return None
    errors = int(sample.info[key])
    return Score(max(0.0, 1.0 - errors / most), f"{errors} errors" if errors else None)
