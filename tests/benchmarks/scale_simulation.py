"""A step of `rlcr_7b` on many GPUs, from what `make scale` has measured and a model of a GPU.

    python tests/benchmarks/scale_simulation.py                     prints a table
    python tests/benchmarks/scale_simulation.py --gpus 8,64 --write    puts it into docs/scale.md

Work on GPUs is what `platform/rlx/trial/duration.py` expects; no run was that large. Work of the
hosts is what docs/scale.md has measured for a step of 10,000 rollouts of 2,000 tokens, in
proportion to tokens, since its slopes are about 1. One node has eight GPUs and as many ranks, each
with a core as fast as the machine of the measurement. The prompts of a step are so many per GPU, or
always as many.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scale_page import PAGE

import rlx
from rlx.trial import (
    GPUS,
    LevelTokens,
    SamplingWork,
    estimate_sampling_seconds,
    estimate_update_seconds,
    load_model_shape,
)

__all__ = ["Step", "find_bottleneck", "main", "read_measured", "simulate_step"]

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "rlcr_7b.yaml"
BEGIN, END = "<!-- simulation -->", "<!-- /simulation -->"
NODE = 8
"""GPUs, and ranks, of a node."""
NETWORK = 50e9
"""Bytes per second of a GPU's own network card of 400 Gbit/s, by its data sheet."""
ALL = ("gathering", "rows", "credit", "figures")
"""What every rank does for the whole step."""
PACKED = 2
"""A rank packs at most twice its share. The page's figure is of a whole step on every rank, before
packing was divided."""
RECORDED = (
    *("trained rows", "index rows", "table", "text of tokens", "index column"),
    *("Parquet file", "PostgreSQL"),
)
"""What the first rank records, in a thread beside the next step."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A step that was measured on the CPU.

    Attributes:
        tokens: of its trees.
        seconds: CPU seconds of a part, of the largest number of ranks.
        memory: GiB that a rank holds at the most.
    """

    tokens: float
    seconds: dict[str, float]
    memory: float


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a step's parts, and GiB of a node's memory for it.

    Attributes:
        recording: beside the next step; it only counts if that ends first.
    """

    gpus: int
    rollouts: int
    sampling: float
    scoring: float
    assembling: float
    update: float
    exchange: float
    recording: float
    memory: float

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        parts = self.sampling, self.scoring, self.assembling, self.update, self.exchange
        return max(sum(parts), self.recording)


def read_measured(page: Path = PAGE) -> Measured:
    """Reads what `make scale` wrote: the columns of the most ranks."""
    text = page.read_text()
    tokens = re.search(r"([\d.]+) million tokens in trees", text)
    rows = re.findall(r"^\| ([\w ,]+) \| [\w ,]*rank[\w ,]* \|(.*)\|$", text, re.MULTILINE)
    assert tokens and rows, f"{page} has no tables of make scale"
    seconds, memory = {}, 0.0
    for name, cells in rows:
        numbers = [cell.strip() for cell in cells.split("|")]
        half = (len(numbers) - 1) // 2  # CPU seconds, then MiB, then a ratio
        if name.startswith("all,"):
            memory = max(memory, *(float(n) for n in numbers[half : 2 * half])) / 1024
        else:
            seconds[name] = float(numbers[half - 1])
    return Measured(float(tokens[1]) * 1e6, seconds, memory)


def simulate_step(measured: Measured, gpus: int, prompts: int) -> Step:
    """The step on so many GPUs."""
    experiment = rlx.read(EXPERIMENT)
    spec, phase = experiment.spec, experiment.plan().report.phases[-1]
    shape = load_model_shape(spec.model)
    assert shape is not None
    times = prompts / spec.rollout.prompts_per_step
    levels = tuple(_multiply(level, times) for level in phase.tokens.levels)
    runner = spec.runner.model_copy(update={"ranks": gpus})
    work = SamplingWork(shape=shape, levels=levels, ranks=gpus, max_rows=spec.sampler.max_rows)
    tokens = phase.tokens.shared[1] * times
    share = tokens / measured.tokens
    cost = {name: share * seconds for name, seconds in measured.seconds.items()}
    ranks = 4  # of the column that was read: a rank's share of the scoring
    gradients = 2 * shape.parameters
    return Step(
        gpus=gpus,
        rollouts=round(levels[-1].turns),
        sampling=estimate_sampling_seconds(work, GPUS["H100"], "vllm"),
        scoring=cost["scoring"] * ranks / gpus,
        assembling=sum(cost[name] for name in ALL) + cost["packing"] * PACKED / gpus,
        update=estimate_update_seconds(runner, shape, tokens, GPUS["H100"]),
        exchange=2 * gradients / NETWORK,
        recording=sum(cost.get(name, 0.0) for name in RECORDED),
        memory=NODE * measured.memory * share,
    )


def _multiply(level: LevelTokens, times: float) -> LevelTokens:
    """The level of a step with so many times as many prompts."""
    return replace(level, turns=level.turns * times, openings=level.openings * times)


def find_bottleneck(step: Step) -> str:
    """What takes the most of a step."""
    named = {
        "sampling": step.sampling,
        "update": step.update,
        "every rank assembling all rows": step.assembling,
        "the first rank's record": step.recording,
    }
    return max(named, key=lambda name: named[name])


def build_table(steps: Sequence[Step]) -> str:
    """A line for each step."""
    lines = [
        "| GPUs | rollouts | sampling | scoring | assembling | update | gradients | step | record "
        "| memory of a node | most time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for step in steps:
        seconds = [step.sampling, step.scoring, step.assembling, step.update, step.exchange]
        shown = [*seconds, step.seconds, step.recording]
        cells = [f"{step.gpus}", f"{step.rollouts:,}", *(f"{one:.1f} s" for one in shown)]
        cells += [f"{step.memory:,.0f} GiB", find_bottleneck(step)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def list_steps(gpus: Sequence[int], per_gpu: int) -> Iterator[Step]:
    """Yields steps that grow with their GPUs, then the same step on more and more."""
    measured = read_measured()
    for number in gpus:
        yield simulate_step(measured, number, per_gpu * number)
    for number in gpus[1:]:
        yield simulate_step(measured, number, per_gpu * gpus[0])


def main(arguments: list[str] | None = None) -> int:
    """Prints the table, or writes it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", default="8,64,512")
    parser.add_argument("--prompts-per-gpu", type=int, default=16, help="as in rlcr_7b")
    parser.add_argument("--write", action="store_true", help="into docs/scale.md")
    chosen = parser.parse_args(arguments)
    gpus = [int(number) for number in chosen.gpus.split(",")]
    table = build_table(list(list_steps(gpus, chosen.prompts_per_gpu)))
    print(table)
    if chosen.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
