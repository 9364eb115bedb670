"""Seconds of a step that a simple model of a GPU expects: nothing is measured.

    python tests/gpu/expect.py NAME... [--gpu H100]

Sampling reads all weights and the keys and values of all rows in every decoding step, at a share of
the memory's bandwidth; an update takes 6 floating-point operations per parameter and token, 8 with
recomputation, at a share of the peak. All turns are at their limit. Real times may be half or
twice as long.
"""

import argparse
from pathlib import Path

import rlx
from rlx.plan.report import PhaseReport
from rlx.spec import ExperimentSpec
from rlx.trial import load_model_shape

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
GPUS = {"A100": (312e12, 2.0e12), "H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}
"""Dense bfloat16 operations and bytes of memory per second (data sheets)."""
REACHED = (0.4, 0.6)
"""Shares of them that well-made code reaches."""
LAUNCH = 1e-3
"""Seconds of a decoding step besides: draws, looks at finished rows."""


def expect_seconds(spec: ExperimentSpec, phase: PhaseReport, gpu: str) -> tuple[float, float]:
    """Seconds of sampling and of the update of one step."""
    shape = load_model_shape(spec.model)
    assert shape is not None
    flops, bandwidth = (a * b for a, b in zip(GPUS[gpu], REACHED, strict=True))
    token = shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
    sampling = before = 0.0
    for level in phase.tokens.levels:
        rows = level.turns / spec.runner.ranks
        batch = min(rows, spec.sampler.max_rows)
        length = before + level.opening + level.at_most / 2
        read = 2 * shape.parameters + batch * length * token
        sampling += rows / batch * level.at_most * (read / bandwidth + LAUNCH)
        before += level.opening + level.at_most
    per_token = (8 if spec.runner.activation_checkpointing else 6) * shape.parameters
    return sampling, phase.tokens.shared[1] / spec.runner.ranks * per_token / flops


def main() -> None:
    """One line per experiment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="below experiments/")
    parser.add_argument("--gpu", choices=list(GPUS), default="H100")
    options = parser.parse_args()
    for name in options.names:
        experiment = rlx.read(EXPERIMENTS / f"{name}.yaml")
        phase = experiment.plan().report.phases[-1]
        sampling, update = expect_seconds(experiment.spec, phase, options.gpu)
        print(f"{name}: sampling {sampling:.0f} s, update {update:.0f} s", flush=True)


if __name__ == "__main__":
    main()
