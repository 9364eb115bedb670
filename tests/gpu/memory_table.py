"""Memory of a step of every profile for GPUs: what `rlx plan` expects, beside fake tensors.

    python tests/gpu/memory_table.py [NAME...]

Prints the table of docs/gpu.md, in GiB on one rank's device, with all turns at their limit. Weights
and the optimizer's state are counted. What sampling adds, and what a micro-batch of an update adds,
is also measured: the sampler's and the learner's own code computes with tensors that have shapes
and no numbers. The learner's models have 4 and 8 layers: every further layer adds the same. vLLM
takes the share of the GPU that it is given. Nothing but the plan is known of an optimizer step.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_memory import measure_update
from fake_sampling import measure_sampling

from rlx.checks import check_file
from rlx.plan.report import PhaseReport, build_plan
from rlx.spec import ExperimentSpec
from rlx.trial import ModelShape, load_model_shape

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PROFILES = sorted(
    str(path.relative_to(EXPERIMENTS).with_suffix(""))
    for path in EXPERIMENTS.rglob("*.yaml")
    if re.search(r"^model: .*kind: pretrained", path.read_text(), re.MULTILINE)
)
HEADING = (
    *("profile", "GPUs", "ZeRO stage", "sampling: plan", "fake", "update: plan", "fake"),
    *("optimizer step: plan", "of 24 GB", "of 80 GB", "of 141 GB"),
)
LAYERS = (4, 8)
"""Layers of the two models whose updates are measured."""
MEASURED = {
    "sampling": ("the sampler's cache", "logits of a decoding step"),
    "update": ("activations", "logits", "one layer, or logits"),
}
"""Parts of a plan in whose place a measured size is."""
GIB = 1 << 30


def read_profile(name: str) -> tuple[ExperimentSpec, PhaseReport]:
    """The experiment, and the plan of its last phase."""
    path = EXPERIMENTS / f"{name}.yaml"
    read, plugins = check_file(path, ())
    return read.spec, build_plan(path, read, plugins).phases[-1]


def list_plan_cells(name: str, spec: ExperimentSpec, phase: PhaseReport) -> tuple[str, ...]:
    """All cells but those of fake tensors, whose places are empty."""
    assert phase.memory is not None
    totals = phase.memory.stage_totals
    by_vllm = spec.sampler.holds_weights_apart
    cells = [name, str(spec.runner.ranks), str(spec.runner.zero_stage)]
    cells += ["vLLM" if by_vllm else f"{totals['sampling'] / GIB:.1f}", ""]
    cells += [f"{totals['update'] / GIB:.1f}", "", f"{totals['optimizer step'] / GIB:.1f}"]
    for size in ("24 GB", "80 GB", "141 GB"):
        share = phase.gpus[size]
        cells.append(f"{share:.0%}" if share <= phase.gpu_room else "no")
    return tuple(cells)


def measure_stages(spec: ExperimentSpec, phase: PhaseReport) -> tuple[float | None, float]:
    """GiB at the peaks of sampling, None for vLLM, and of an update."""
    shape, memory = load_model_shape(spec.model), phase.memory
    assert shape is not None
    assert memory is not None
    runner, parts, budget = spec.runner, memory.parts, phase.tokens
    tokens = min(runner.micro_batch_tokens, -(-int(budget.shared[1]) // runner.ranks))
    targets = int(tokens * min(1.0, budget.sampled[1] / budget.shared[1]))

    def measure(layered: ModelShape) -> float:
        return measure_update(
            layered,
            tokens,
            targets,
            recomputes=runner.activation_checkpointing,
            chunks=runner.zero_stage != 3,
        )

    def add_held(stage: str, size: float) -> float:
        held = [part for part in memory.stages[stage] if part not in MEASURED[stage]]
        return (sum(parts[part] for part in held) + size) / GIB

    few, more = (measure(replace(shape, layers=count)) for count in LAYERS)
    each = (more - few) / (LAYERS[1] - LAYERS[0])
    update = add_held("update", more + each * (shape.layers - LAYERS[1]))
    if spec.sampler.holds_weights_apart:
        return None, update
    sampling = measure_sampling(shape, budget.levels, spec.sampler.max_rows, runner.ranks)
    return add_held("sampling", sampling), update


def format_row(name: str, spec: ExperimentSpec, phase: PhaseReport) -> str:
    """A row in Markdown."""
    cells = list(list_plan_cells(name, spec, phase))
    sampling, update = measure_stages(spec, phase)
    cells[4] = "" if sampling is None else f"{sampling:.1f}"
    cells[6] = f"{update:.1f}"
    return f"| {' | '.join(cells)} |"


def main(*names: str) -> None:
    """Prints the table."""
    print(f"| {' | '.join(HEADING)} |\n|{' --- |' * len(HEADING)}")
    for name in names or PROFILES:
        print(format_row(f"`{name}`", *read_profile(name)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
