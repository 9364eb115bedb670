"""Figures of calibration as a metric of Inspect, offered by `rlx eval --with inspect:FILE` as the
module `rlx_inspect`, beside a copy of `rlx.evaluation.calibration`: nothing else of rlx is there.
"""

import math

from inspect_ai.scorer import Metric, SampleScore, Value, metric, value_to_float

from calibration_of_rlx import measure_calibration  # isort: skip


@metric  # type: ignore[untyped-decorator]  # Inspect is not installed beside rlx
def calibration() -> Metric:
    """What `rlx eval` computes of correct answers and stated confidences.

    A score's value says whether the answer is right; its metadata have the `confidence` in [0, 1],
    and none where it cannot be read, which counts as the worst one.
    """
    to_float = value_to_float()

    def measure(scores: list[SampleScore]) -> Value:
        stated = [(score.score.metadata or {}).get("confidence") for score in scores]
        figures = measure_calibration(
            [to_float(score.score.value) for score in scores],
            [math.nan if confidence is None else float(confidence) for confidence in stated],
            problems=[str(score.sample_id) for score in scores],
        )
        own = ("n", "accuracy")  # Inspect has these itself
        return {
            name: value
            for name, value in figures.items()
            if name not in own and isinstance(value, int | float)
        }

    return measure
