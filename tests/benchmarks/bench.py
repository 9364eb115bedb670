"""`make bench`: figures that anyone can measure again, as ratios or CPU seconds within one run.

    python tests/benchmarks/bench.py            all of them
    BENCH=countdown_score python tests/benchmarks/bench.py      one; the others' figures stay

Writes docs/benchmarks.md and docs/bench.json, a list of {name, ratio, low, high, baseline, unit};
where a figure has a time or a bound, also {milliseconds, share_of_bandwidth}.
"""

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def validate_cpu_seconds() -> list[dict]:
    """CPU seconds of a whole `rlx validate experiments/rlcr.yaml`, start of Python included."""
    spent = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [Path(sys.executable).with_name("rlx"), "validate", "experiments/rlcr.yaml"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return [row("validate_cpu_seconds", spent[1:], "none: CPU seconds", "CPU s")]


def countdown_score() -> list[dict]:
    """Scores of well-formed answers per CPU second, over a regex-and-eval scorer's."""
    from rlx_plugins.countdown import CountdownTask, compute_score

    task = CountdownTask(numbers={3: 0.5, 4: 0.5}, operators="+-*/")
    cases = []
    for i in range(1500):
        problem = task.problem("train", i, 0)
        truth = {"target": problem.fields["target"], "numbers": problem.fields["numbers"]}
        cases.append((task.demonstration(problem, i).turns[0], truth))
    assert [compute_score(*c) for c in cases] == [literal_score(*c) for c in cases]
    ratios = []
    for _ in range(6):
        theirs = cpu(lambda: [literal_score(*c) for c in cases])
        ours = cpu(lambda: [compute_score(*c) for c in cases])
        ratios.append(theirs / ours)
    return [row("countdown_score", ratios[1:], "regex and eval, written plainly", "times as fast")]


def literal_score(text: str, truth: dict) -> float:
    """The source's scorer read literally; it may hang, so only for harmless answers, or watched."""
    if "Assistant:" in text:
        text = text.split("Assistant:", 1)[1]
    blocks = re.findall(r"<answer>(.*?)</answer>", text.split("\n")[-1])
    if not blocks:
        return 0.0
    equation = blocks[-1].strip()
    if sorted(int(n) for n in re.findall(r"\d+", equation)) != sorted(truth["numbers"]):
        return 0.1
    if not re.match(r"^[\d+\-*/().\s]+$", equation):
        return 0.1
    try:
        value = eval(equation, {"__builtins__": None}, {})
    except (ArithmeticError, SyntaxError, TypeError):
        return 0.1
    return 1.0 if abs(value - truth["target"]) < 1e-5 else 0.1


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def row(name: str, values: list[float], baseline: str, unit: str) -> dict:
    """One line of bench.json: median, lowest and highest."""
    return {
        "name": name,
        "ratio": round(statistics.median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
        "baseline": baseline,
        "unit": unit,
    }


def credit() -> list[dict]:
    """Kernels of credit; see credit_kernels.py beside this file."""
    from credit_kernels import credit_kernels

    return credit_kernels()


def graph() -> list[dict]:
    """The triple store; see graph.py beside this file."""
    from graph import knowledge_graph

    return knowledge_graph()


def registry() -> list[dict]:
    """Many processes over one registry; see registry_load.py beside this file."""
    from registry_load import registry_load

    return registry_load()


BENCHMARKS = {
    f.__name__: f for f in (validate_cpu_seconds, countdown_score, credit, graph, registry)
}

ABOUT_CREDIT = """
Kernels of credit are beside a plain loop over columns (GAE), rows (GRPO) or rows and turns
(turn_proportional), on one thread and in CPU time, at rows x tokens; three rounds after a warm-up.
The share of bandwidth is the time that the bytes need which must be read and written once, at the
speed of a triad a = b + s·c over 64 MiB arrays measured in the same rounds, over the time taken.
Both sides have their memory in huge pages (THP_MEM_ALLOC_ENABLE=1): without them, fresh pages cost
more than the arithmetic.
"""

ABOUT_GRAPH = """
The graph of the kg agent holds a million facts about 200,000 entities by 500 relations in three
sorted arrays. Loading reads them from a TSV file; memory is the most that loading took; a query
names one of the four functions with entity and relation of a fact drawn at random, and gives labels
in order. Beside it are dicts of dicts of sets over interned numbers, in the same unit. Three
rounds, each in a process of its own.
"""


ABOUT_REGISTRY = """
The registry is under the load of 16 processes for two minutes, on each database. Each submits a run
of its own and one that all of them submit, claims the oldest that is queued, starts it, writes
three steps of 40 metrics with its journal, reads them back, and ends it. The lowest and highest are
those of ten windows; ms is the middle call's. It ends with an error, not a figure, where a call
fails, a run is claimed twice, or a value is missing.
"""


def main() -> None:
    chosen = os.environ.get("BENCH", "").split(",") if os.environ.get("BENCH") else BENCHMARKS
    rows = [figure for name in chosen for figure in BENCHMARKS[name]()]
    stored = ROOT / "docs" / "bench.json"
    if chosen is not BENCHMARKS:
        kept = {figure["name"]: figure for figure in json.loads(stored.read_text())}
        rows = list({**kept, **{figure["name"]: figure for figure in rows}}.values())
    stored.write_text(json.dumps(rows, indent=2) + "\n")
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`: medians of five after a warm-up, lowest and highest beside them.",
        ABOUT_CREDIT.rstrip("\n"),
        ABOUT_GRAPH.rstrip("\n"),
        ABOUT_REGISTRY,
        "| figure | median | low | high | unit | ms | share of bandwidth | compared with |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| `{r['name']}` | {r['ratio']} | {r['low']} | {r['high']} | {r['unit']} "
            f"| {r.get('milliseconds', '')} | {r.get('share_of_bandwidth', '')} "
            f"| {r['baseline']} |"
            for r in rows
        ),
        "",
    ]
    (ROOT / "docs" / "benchmarks.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    # Read by torch when it first allocates.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    main()
