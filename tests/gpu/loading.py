"""Memory while models of 7, 14 and 32 B are loaded by 8 ranks, by ZeRO stage.

    python tests/gpu/loading.py [--ranks N]

Loads nothing: bytes are counted (`rlx.trial.estimate_loading`), as `tests/learner/test_loading.py`
compares with what ranks take. Prints the table of docs/gpu.md.
"""

import argparse

from rlx.spec import RunnerSpec
from rlx.trial import estimate_loading
from rlx.trial.model_shape import KNOWN

SIZES = ("7B", "14B", "32B")
STAGES = (1, 2, 3)
HELD = 12
"""Bytes per trained weight that stay on the devices of all ranks together: Adam's moments, and the
float32 copy. The float32 gradient has 4 more."""


def list_rows(ranks: int) -> list[tuple[str, ...]]:
    """Rows of the table, with sizes in GB."""
    rows = []
    for size in SIZES:
        shape = KNOWN[f"Qwen/Qwen2.5-{size}"]
        count = shape.parameters
        for stage in STAGES:
            runner = RunnerSpec(zero_stage=stage, dtype="bfloat16", ranks=ranks)
            memory = estimate_loading(runner, shape, count)
            shared, private = memory.host.values()
            weights = 2 * count // (ranks if stage == 3 else 1)
            held = weights + HELD * count // ranks + 4 * count // (1 if stage == 1 else ranks)
            numbers = (shared + ranks * private, 2 * count, memory.peak, held)
            cells = (f"{number / 1e9:.0f}" for number in numbers)
            rows.append((size, str(stage), *cells, memory.largest_moment))
    return rows


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    ranks = parser.parse_args().ranks
    heading = (
        *("model", "ZeRO stage", f"host, {ranks} ranks", "the sampler's copy"),
        *("learner: peak of loading", "learner: after its first step", "largest while loading"),
    )
    for row in (heading, ("---",) * len(heading), *list_rows(ranks)):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
