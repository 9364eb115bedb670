"""Seconds of a step that a simple model of a GPU expects.

    python tests/gpu/expect.py NAME... [--gpu H100]

A decoding step reads all weights and the keys and values of all rows, at a share of the memory's
bandwidth; takes 2 floating-point operations per parameter and row, at a share of the peak; starts
the kernels of every layer; and draws tokens from the whole vocabulary. An update takes 6 operations
per parameter and token, 8 with recomputation, at a smaller share of the peak. All turns are at
their limit. The shares are those of a model of 1.5 B parameters on one H200; elsewhere, and for
other sizes, real times may be half or twice as long.
"""

import argparse
from pathlib import Path

import rlx
from rlx.plan.report import PhaseReport
from rlx.spec import ExperimentSpec
from rlx.trial import load_model_shape

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
GPUS = {
    "4090": (165e12, 1.0e12),
    "A100": (312e12, 2.0e12),
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
}
"""Dense bfloat16 operations and bytes of memory per second (data sheets)."""
DECODED, LEARNED = 0.6, 0.3
"""Shares of the operations that decoding and updates reach."""
READ = 0.6
"""Share of the bandwidth."""
LAYER = 1e-4
"""Seconds of a layer's small kernels in a decoding step."""
PASSES = 12
"""Times that a draw reads or writes a float32 number per row and token of the vocabulary."""


def expect_seconds(spec: ExperimentSpec, phase: PhaseReport, gpu: str) -> tuple[float, float]:
    """Seconds of sampling and of the update of one step."""
    shape = load_model_shape(spec.model)
    assert shape is not None
    peak, bandwidth = GPUS[gpu][0], READ * GPUS[gpu][1]
    token = shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
    sampling = before = 0.0
    for level in phase.tokens.levels:
        rows = level.turns / spec.runner.ranks
        batch = min(rows, spec.sampler.max_rows)
        length = before + level.opening + level.at_most / 2
        read = 2 * shape.parameters + batch * (length * token + PASSES * 4 * shape.vocabulary)
        product = 2 * shape.parameters * batch / (DECODED * peak)
        step = read / bandwidth + product + LAYER * shape.layers
        sampling += rows / batch * level.at_most * step
        before += level.opening + level.at_most
    per_token = (8 if spec.runner.activation_checkpointing else 6) * shape.parameters
    update = phase.tokens.shared[1] / spec.runner.ranks * per_token / (LEARNED * peak)
    return sampling, update


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
