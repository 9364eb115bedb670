"""`make bench`: figures that anyone can measure again, as ratios or CPU seconds within one run.

    python tests/benchmarks/bench.py            all of them, which takes about an hour
    BENCH=smollm2_grpo_step python tests/benchmarks/bench.py   these; the others' figures stay

Writes benchmarks.md and bench.json in results/, a list of {name, ratio, low, high, baseline, unit},
after every benchmark, so that a run that was broken off is taken up by naming what is missing.
Besides, a figure has its `benchmark` and {machine, made}, and where they are known {wall,
milliseconds}. Every benchmark runs in a process of its own.
"""

import json
import os
import subprocess
import sys
from datetime import date
from importlib import import_module
from pathlib import Path

from page import machine, page

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results")
STORED, PAGE = RESULTS / "bench.json", RESULTS / "benchmarks.md"

BENCHMARKS = {
    "smollm2_grpo_step": "real_steps",
    "smollm2_rlcr_step": "real_steps",
    "verb_cpu_ratios": "starts",
    "start_cpu_seconds": "starts",
}
"""By the name of its function: the module beside this file."""

QUIET = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}


def main() -> int:
    """Runs the benchmarks that BENCH names, or all. Returns how many failed."""
    asked = os.environ.get("BENCH", "")
    names = asked.split(",") if asked else list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        print(f"BENCH: no {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names:
        print(f"{name} ...", flush=True)
        figures = apart(name)
        failed += figures is None
        for figure in figures or []:
            print(f"    {figure['name']}: {figure['ratio']} {figure['unit']}", flush=True)
        if figures is not None:
            store(name, figures)
    return min(failed, 1)


def apart(name: str) -> list[dict] | None:
    """Figures of one benchmark, from a process of its own; None where it failed."""
    reader, writer = os.pipe()
    log = ROOT / ".bench" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, name, str(writer)],
            cwd=ROOT,
            env={**os.environ, **QUIET},
            pass_fds=[writer],
            stderr=errors,
        )
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    if process.wait() == 0:
        return json.loads(said)
    print(f"    failed: {log.relative_to(ROOT)} says\n{log.read_text()[-2000:]}", flush=True)
    return None


def run(name: str, out: int) -> None:
    """Runs one benchmark and writes its figures to a descriptor."""
    figures = getattr(import_module(BENCHMARKS[name]), name)()
    with os.fdopen(out, "w") as pipe:
        json.dump(figures, pipe)


def store(name: str, figures: list[dict]) -> None:
    """Puts the figures of one benchmark in the place of those it had, and writes the page."""
    kept = {}
    for figure in json.loads(STORED.read_text()):
        kept.setdefault(figure["benchmark"], []).append(figure)
    made = {"machine": machine(), "made": date.today().isoformat()}
    kept[name] = [{"benchmark": name, **figure, **made} for figure in figures]
    rows = [figure for known in BENCHMARKS for figure in kept.get(known, [])]
    STORED.write_text(json.dumps(rows, indent=2) + "\n")
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())
