"""results/benchmarks.md, written from results/bench.json."""

import os
import platform
from importlib.metadata import version

HEAD = """\
# Benchmarks

Written by `make bench`; `make bench BENCH=smollm2_rlcr_step` measures one again and leaves the
others.
The figures are in [bench.json](bench.json) too. Peers are installed by the same command, each into
an environment of its own below `.bench/`, as pinned in `tests/benchmarks/peers/`.

Both sides of a ratio take turns in one run, on one thread; a first round does not count. The
median, lowest and highest are of the rounds' ratios of CPU time, which other work on the machine
hardly touches: they are what goals are held against. "Clock" is the median of the same ratio by the
clock, and "ms" is our own CPU time. Ratios carry over to other machines better than times do; below
each table stands where its figures were made.

A name that ends with `_strongest` is beside the strongest plain form that we know.
"""

STEPS = """\
`smollm2_grpo_step_*` and `smollm2_rlcr_step_*` are whole steps of SmolLM2-135M-Instruct in float32,
whose prompts of about 400 tokens differ in the last few: 4 prompts with 8 answers of 32 tokens (8
prompts where a name ends with `_8`), and 6 with 4 answers of 32 and 4 confidences of 12 below each.
TRL has micro-batches of 4 rows, and computes its output layer at every position, as it does on
every CPU. `_strongest` is `generate` with one cache, and an update with transformers' cache with
gradient, of at most six prompts at a time, in which no token is read twice but what problems share.
"""

SMALL = """\
`verb_cpu_ratios` are whole commands, start of Python included, on a finished run of
`experiments/quick.yaml`; `validate` is of `experiments/rlcr.yaml`. `start_cpu_seconds` is of all
processes of a run of `experiments/quick.yaml` whose warm start is stored: from `rlx submit` to the
end of the first step with one rank and with two, and from the kill of a rank to its successor's
next step. Other work on the machine makes CPU seconds up to twice as many, and there was some: the
imports beside them are of the same rounds. The mirror to MLflow is off the path of training: the
supervisor imports MLflow after the first step, and sends batches of the registry's values, as
`mlflow.log_metrics` does.
"""

SECTIONS = {
    "Steps of training": (STEPS, ("smollm2_grpo_step", "smollm2_rlcr_step")),
    "Starts": (SMALL, ("verb_cpu_ratios", "start_cpu_seconds")),
}
"""By title: what is compared with what, and the benchmarks whose figures follow."""

COLUMNS = {
    "median": "ratio",
    "low": "low",
    "high": "high",
    "clock": "wall",
    "unit": "unit",
    "ms": "milliseconds",
    "compared with": "baseline",
}


def page(rows: list[dict]) -> str:
    """The page, from the figures of bench.json."""
    parts = [HEAD]
    for title, (about, names) in SECTIONS.items():
        own = [row for row in rows if row["benchmark"] in names]
        if not own:
            continue  # not measured yet
        parts.append(f"## {title}\n\n{about}\n{_table(own)}\n{_describe_origins(own)}")
    return "\n".join(parts)


def _describe_origins(rows: list[dict]) -> str:
    """On which machines figures were made, and when."""
    made = dict.fromkeys(f"{row['machine']}, {row['made']}" for row in rows)
    return f"Measured on {'; '.join(made)}.\n"


def _table(rows: list[dict]) -> str:
    columns = {title: key for title, key in COLUMNS.items() if any(key in row for row in rows)}
    lines = [f"| figure | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for row in rows:
        cells = (_shown(row.get(key, "")) for key in columns.values())
        lines.append(f"| `{row['name']}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    """A number with the digits that it deserves."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def machine() -> str:
    """What is worth knowing of the machine, and nothing that would name it."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("torch", "transformers", "deepspeed")
    said = ", ".join(f"{name} {version(name)}" for name in packages)
    python = platform.python_version()
    return (
        f"{cores} cores ({platform.machine()}), {memory:.0f} GiB, no GPU: Python {python}, {said}"
    )
