"""Rewards that read what the environment reported of a turn."""

from rlx.plugin import Example, Sample, Score, reward

__all__ = ["found", "sensible"]


def _reported(*history: dict[str, object], **info: object) -> Sample:
    return Sample(
        id="0",
        problem={"low": 1, "high": 12, "secret": 7},
        turn="guess",
        number=len(history) + 1,
        response="<answer>7</answer>",
        history=history,
        info=info,
    )


@reward(
    examples=[
        Example(name="gold", sample=_reported(found=True), value=1.0),
        Example(name="not found", sample=_reported(found=False), value=0.0),
        Example(
            name="late", sample=_reported({"found": False}, found=True), value=0.9, reason="turn 2"
        ),
        Example(name="no environment", sample=_reported(), value=None),
    ]
)
def found(sample: Sample, *, delay: float = 0.1) -> Score | None:
    """Of a whole rollout: 1 where it ends with the secret number, `delay` less for each turn."""
    if "found" not in sample.info:
        return None
    if not sample.info["found"]:
        return Score(0.0, "not found")
    late = len(sample.history)
    return Score(max(0.0, 1.0 - delay * late), f"turn {late + 1}" if late else None)


@reward(
    examples=[
        Example(name="gold", sample=_reported(sensible=True), value=1.0),
        Example(name="ruled out before", sample=_reported(sensible=False), value=0.0),
        Example(name="no environment", sample=_reported(), value=None),
    ]
)
def sensible(sample: Sample) -> float | None:
    """Of a turn: 1 for a guess that what was said before leaves possible."""
    return float(sample.info["sensible"]) if "sensible" in sample.info else None
