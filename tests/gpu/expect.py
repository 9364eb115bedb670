"""Seconds of a step that a simple model of a GPU expects (`platform/rlx/trial/duration.py`).

    python tests/gpu/expect.py NAME... [--gpu H100] [--engine vllm]

All turns are at their limit.
"""

import argparse
from pathlib import Path

import rlx
from rlx.plan.report import PhaseReport
from rlx.spec import ExperimentSpec
from rlx.trial import (
    GPUS,
    Gpu,
    SamplingWork,
    estimate_sampling_seconds,
    estimate_update_seconds,
    load_model_shape,
)

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def expect_seconds(
    spec: ExperimentSpec, phase: PhaseReport, gpu: Gpu, engine: str
) -> tuple[float, float]:
    """Seconds of sampling and of the update of one step."""
    shape, runner = load_model_shape(spec.model), spec.runner
    assert shape is not None
    work = SamplingWork(
        shape=shape,
        levels=phase.tokens.levels,
        ranks=runner.ranks,
        max_rows=spec.sampler.max_rows,
    )
    sampling = estimate_sampling_seconds(work, gpu, engine)
    return sampling, estimate_update_seconds(runner, shape, phase.tokens.shared[1], gpu)


def main() -> None:
    """One line per experiment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="below experiments/")
    parser.add_argument("--gpu", choices=list(GPUS), default="H100")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    options = parser.parse_args()
    for name in options.names:
        experiment = rlx.read(EXPERIMENTS / f"{name}.yaml")
        phase = experiment.plan().report.phases[-1]
        sampling, update = expect_seconds(experiment.spec, phase, GPUS[options.gpu], options.engine)
        print(f"{name}: sampling {sampling:.0f} s, update {update:.0f} s", flush=True)


if __name__ == "__main__":
    main()
