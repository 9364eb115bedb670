"""Rewards that read the `info` that the environment reports for a turn."""

from rlx.plugin import Example, Sample, Score, reward


def _build_guess_sample(*history: dict[str, object], **info: object) -> Sample:
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
        Example(name="gold", sample=_build_guess_sample(found=True), value=1.0),
        Example(name="not found", sample=_build_guess_sample(found=False), value=0.0),
        Example(
            name="late",
            sample=_build_guess_sample({"found": False}, found=True),
            value=0.9,
            reason="turn 2",
        ),
        Example(name="no environment", sample=_build_guess_sample(), value=None),
    ]
)
def score_found_secret(sample: Sample, *, delay: float = 0.1) -> Score | None:
    """For a whole rollout: 1 if it finds the secret number, minus `delay` per earlier turn."""
    if "found" not in sample.info:
        return None
    if not sample.info["found"]:
        return Score(0.0, "not found")
    late = len(sample.history)
    return Score(max(0.0, 1.0 - delay * late), f"turn {late + 1}" if late else None)


@reward(
    examples=[
        Example(name="gold", sample=_build_guess_sample(sensible=True), value=1.0),
        Example(name="ruled out before", sample=_build_guess_sample(sensible=False), value=0.0),
        Example(name="no environment", sample=_build_guess_sample(), value=None),
    ]
)
def score_sensible_guess(sample: Sample) -> float | None:
    """For a turn: 1 for a guess consistent with the earlier observations, else 0."""
    return float(sample.info["sensible"]) if "sensible" in sample.info else None
