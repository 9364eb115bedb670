"""What lists and records cost as runs, steps, rows and tokens grow, with the slope of each.

A slope is the exponent s of cost = c · nˢ that fits the points best: 0 where the cost does not
grow, 1 where it grows in proportion.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from harness import fit_slope, row, spent
from large_registry import METRICS, Size, build, sampled

from rlx.record import Recorder
from rlx_registry import Registry

__all__ = ["growth", "submit_run"]

ROUNDS = 3
RUNS = (10, 100, 1000)
ROWS = (64, 160, 640)
TOKENS = (100, 800, 6400)
STEPS = (10, 100, 1000)
LARGE = (1024, 8192)
"""Rows of a large step, and tokens of each."""
RECORDS = {
    "record": "CPU ms a step",
    "registry": "KB a step",
    "journal": "KB a step",
    "parquet": "KB a step",
}
"""What is measured of a step's record, and its unit."""
LITTLE = {"steps": 2, "long_steps": 20, "recorded": 1, "recorded_steps": 2, "rows": 16}
BIG = {"big_rows": 8, "big_tokens": 10}


def growth() -> list[dict]:
    """Figures of every point, and slopes."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        return [*_lists(place), *_steps(place), *_rows(place), *_tokens(place), *_large(place)]


def _lists(place: Path) -> list[dict]:
    """CPU seconds of commands over registries with evaluations and their payloads."""
    urls = {n: build(place / f"runs{n}", Size(runs=n, **LITTLE, **BIG)) for n in RUNS}
    commands = {"runs": ["runs"], "runs_json": ["runs", "--json"], "status": ["status", "latest"]}
    return [
        figure
        for name, arguments in commands.items()
        for figure in _along(
            f"growth_{name}", "runs", "CPU s",
            {n: [_command(url, arguments) for _ in range(ROUNDS)] for n, url in urls.items()},
        )
    ]  # fmt: skip


def _command(url: str, arguments: Sequence[str]) -> float:
    """CPU seconds of `rlx`, with the start of Python."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import sys; from rlx.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "RLX_REGISTRY": url}
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _steps(place: Path) -> list[dict]:
    """CPU milliseconds to record the metrics of a step of a run that has as many steps."""
    with Registry.open(f"sqlite:///{place}/steps.db") as registry:
        run = submit_run(registry, place / "steps")
        values = dict.fromkeys(METRICS, 0.5)
        found, step = {}, 0
        for count in STEPS:
            while step < count:
                step += 1
                registry.results.add_metrics(run, step, values)
            took = []
            for _ in range(4 * ROUNDS):
                step += 1
                took.append(1e3 * spent(lambda at=step: _add(registry, run, at, values)).cpu)
            found[count] = took
    return _along("growth_metrics", "steps", "CPU ms a step", found)


def _add(registry: Registry, run: str, step: int, values: Mapping[str, float]) -> None:
    registry.results.add_metrics(run, step, values)


def _rows(place: Path) -> list[dict]:
    costs = {n: _record(place / f"rows{n}", n, TOKENS[0]) for n in ROWS}
    return _of_records("rows", f"of {TOKENS[0]} tokens", costs)


def _tokens(place: Path) -> list[dict]:
    costs = {n: _record(place / f"tokens{n}", ROWS[0], n) for n in TOKENS}
    return _of_records("tokens", f"in each of {ROWS[0]} rows", costs)


def _large(place: Path) -> list[dict]:
    """A step as large as that of a long run on many GPUs."""
    rows, tokens = LARGE
    costs = _record(place / "large", rows, tokens)
    said = f"{rows} rows of {tokens} tokens"
    return [row(f"growth_{kind}_large", costs[kind], said, of) for kind, of in RECORDS.items()]


def _of_records(
    unit: str, about: str, costs: Mapping[int, Mapping[str, list[float]]]
) -> list[dict]:
    return [
        figure
        for kind, of in RECORDS.items()
        for figure in _along(
            f"growth_{kind}_{unit}", f"{unit} {about}", of, {n: costs[n][kind] for n in costs}
        )
    ]


def _record(folder: Path, rows: int, tokens: int) -> dict[str, list[float]]:
    """What recording a step costs: CPU milliseconds, and the bytes by which files grow."""
    folder.mkdir()
    trees, rewards, trained = sampled.sampled(rows, tokens, np.random.default_rng(0))
    took: dict[str, list[float]] = {k: [] for k in ("record", "registry", "journal", "parquet")}
    with Registry.open(f"sqlite:///{folder}/registry.db") as registry:
        run = submit_run(registry, folder / "run")
        recorder = Recorder(registry, run, keep_bodies=True)
        for step in range(1, ROUNDS + 2):
            path = folder / "run" / "rollouts" / f"step_{step:06d}.parquet"
            before = _sizes(folder)

            def record(at: int = step, path: Path = path) -> None:
                recorder.step(
                    at, {"train/loss": 0.5}, trees, rewards, trained, {"phase": "joint"}, path,
                    pieces=sampled.pieces,
                )  # fmt: skip
                recorder.finish_step()

            cost = 1e3 * spent(record).cpu
            if step > 1:  # the first writes tables and imports what the others have
                took["record"].append(cost)
                for name, size in _sizes(folder).items():
                    took[name].append((size - before[name]) / 1e3)
                took["parquet"][-1] = path.stat().st_size / 1e3
    return took


def _sizes(folder: Path) -> dict[str, float]:
    # A database grows page by page, and its log is emptied now and then: both are counted.
    files = [folder / "registry.db", folder / "registry.db-wal"]
    return {
        "registry": float(sum(file.stat().st_size for file in files if file.exists())),
        "journal": float((folder / "run" / "journal.jsonl").stat().st_size),
        "parquet": 0.0,
    }


def submit_run(registry: Registry, folder: Path) -> str:
    """A run with a folder, for which steps can be recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    run, _ = registry.submit(
        digest="d" * 64, seed=0, name="growth", spec={}, yaml="", plugins=[], code={},
        environment={},
    )  # fmt: skip
    registry.update_run(run.id, directory=folder)
    return run.id


def _along(name: str, what: str, unit: str, costs: Mapping[int, Sequence[float]]) -> list[dict]:
    """A figure for each number of `what`, with the slope in the last."""
    middles = [statistics.median(values) for values in costs.values()]
    slope = fit_slope(list(costs), middles)
    figures = [row(f"{name} {n}", values, f"{n} {what}", unit) for n, values in costs.items()]
    figures[-1]["slope"] = round(slope, 3)
    return figures
