"""Many processes submit, claim, write and read one registry; nothing may be lost or doubled.

    python tests/benchmarks/registry_load.py                        16 processes, 120 s, SQLite
    python tests/benchmarks/registry_load.py --on postgresql        the same on a server of its own
    python tests/benchmarks/registry_load.py --processes 4 --seconds 5

Prints rates, and latencies of every kind of call in milliseconds, as JSON. Ends with an error where
a call failed, a run was claimed twice, or a value that was written is not there. Every run has a
folder, so its journal is written too. `BENCH=registry python tests/benchmarks/bench.py` puts the
rates of both databases into docs/benchmarks.md.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from rlx_registry import Registry

sys.path.insert(0, str(Path(__file__).parents[1]))
from postgres import binaries, server

SUBMISSION: dict[str, Any] = {
    "name": "load", "spec": {"steps": 3}, "yaml": "name: load\n", "plugins": [], "code": {},
    "environment": {},
}  # fmt: skip
STEPS, METRICS = 3, 40
WINDOWS = 10
"""Parts of the time whose rates are compared."""
RATES = {"submit": 1, "claim": 1, "write": METRICS, "read": 1}
"""Calls whose rate is told, and how many things each counts for."""


class Timer:
    """When every call ended and how many seconds it took, by its kind."""

    def __init__(self) -> None:
        self.spent: dict[str, list[tuple[float, float]]] = defaultdict(list)

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.spent[kind].append((time.time(), time.perf_counter() - begin))


ready: Barrier
"""Where the processes wait for each other; each has it from `begin`."""


def begin(barrier: Barrier) -> None:
    global ready
    ready = barrier


def work(
    url: str, folder: str, number: int, seconds: float
) -> tuple[float, list[str], dict[str, Any]]:
    """One process: submits a run of its own and one of everybody's, claims, writes, reads.

    Returns:
        When it began, the runs that it had, and when each call ended and what it took, by kind.
    """
    timed, claimed, turn = Timer(), [], 0
    with Registry.open(url) as registry:
        ready.wait()
        start = time.time()
        while time.time() < start + seconds:
            turn += 1
            for digest in (f"{number}-{turn}", f"shared-{turn // 4}"):
                with timed("submit"):
                    registry.submit(digest=digest, seed=0, queue=True, **SUBMISSION)
            with timed("claim"):
                run = registry.claim(["queued"])
            if run is None:
                continue
            claimed.append(run.id)
            own_run(registry, Path(folder) / run.id, run.id, timed)
    return start, claimed, dict(timed.spent)


def own_run(registry: Registry, folder: Path, run_id: str, timed: Timer) -> None:
    """A short life of a run that this process has claimed."""
    folder.mkdir()
    registry.update_run(run_id, directory=folder)
    with timed("start"):
        started = registry.start(run_id, ["submitted"])
    assert started is not None, f"{run_id} was started by another"
    writer = registry.as_writer(run_id, started.attempt)
    for step in range(STEPS):
        with timed("write"):
            writer.results.add_metrics(run_id, step, {f"m{i}": float(i) for i in range(METRICS)})
        with timed("heartbeat"):
            writer.heartbeat(run_id)
        with timed("read"):
            registry.results.metrics(run_id)
    with timed("list"):
        registry.runs(limit=20)
    with timed("end"):
        writer.transition(run_id, ["running"], "finished")


def measure(url: str, processes: int, seconds: float) -> dict[str, Any]:
    """Runs the load and checks what it left."""
    Registry.open(url).close()
    context = get_context("spawn")
    pool = context.Pool(processes, begin, (context.Barrier(processes),))
    with tempfile.TemporaryDirectory() as folder, pool:
        tasks = [(url, folder, number, seconds) for number in range(processes)]
        done = pool.starmap(work, tasks, chunksize=1)
    start = max(each for each, _, _ in done)
    claims = Counter(run for _, claimed, _ in done for run in claimed)
    doubled = [run for run, times in claims.items() if times > 1]
    assert not doubled, f"claimed twice: {doubled}"
    runs = check(url, list(claims))
    kinds = {kind for _, _, spent in done for kind in spent}
    calls = {kind: [call for _, _, spent in done for call in spent.get(kind, [])] for kind in kinds}
    return {
        "processes": processes,
        "seconds": seconds,
        "runs": runs,
        "claimed": len(claims),
        "rates": {kind: rates(calls[kind], start, seconds, RATES[kind]) for kind in RATES},
        "latencies": {kind: latencies([took for _, took in calls[kind]]) for kind in sorted(calls)},
    }


def check(url: str, claimed: list[str]) -> int:
    """Sees that each run was made once and that nothing of it is missing; returns how many."""
    with Registry.open(url, read_only=True) as registry:
        runs = registry.runs()
        submitted = Counter((run.digest, run.seed) for run in runs)
        # A shared run that has finished still stands for its digest: one row each, whatever came.
        assert set(submitted.values()) == {1}, "one experiment has two runs"
        for run in claimed:
            after = [change.after for change in registry.history(run)]
            assert after == ["queued", "submitted", "running", "finished"], (run, after)
            series = registry.results.metrics(run)
            assert {len(points) for points in series.values()} == {STEPS}, run
            assert len(series) == METRICS, run
    return len(runs)


def rates(calls: list[tuple[float, float]], start: float, seconds: float, each: int) -> list[float]:
    """Things per second, in each part of the time."""
    width = seconds / WINDOWS
    counts = Counter(int((at - start) // width) for at, _ in calls)
    return [round(each * counts[window] / width, 1) for window in range(WINDOWS)]


def latencies(times: list[float]) -> dict[str, float]:
    """How long the middle call, one in a hundred and the slowest took, in milliseconds."""
    ms = sorted(1e3 * t for t in times)
    return {
        "p50": round(statistics.median(ms), 2),
        "p99": round(ms[min(len(ms) - 1, len(ms) * 99 // 100)], 2),
        "max": round(ms[-1], 2),
    }


def load(on: str, processes: int, seconds: float) -> dict[str, Any]:
    """Measures one kind of database, "sqlite" or "postgresql", made for this alone."""
    if on == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            return measure(f"sqlite:///{folder}/registry.db", processes, seconds)
    with server(settings=()) as running:  # with fsync, as a real one has it
        return measure(running.url(running.create()), processes, seconds)


def registry_load() -> list[dict[str, Any]]:
    """Rows for docs/benchmarks.md; BENCH_SECONDS says how long each database is under load."""
    seconds, rows = float(os.environ.get("BENCH_SECONDS", "120")), []
    for on in ("sqlite", "postgresql") if binaries() is not None else ("sqlite",):
        found = load(on, 16, seconds)
        latency = found["latencies"]
        for kind, values in found["rates"].items():
            what = {"write": "metric values", "submit": "submissions"}.get(kind, f"{kind}s")
            rows.append(
                {
                    "name": f"registry_{kind} {on}",
                    "ratio": round(statistics.median(values), 1),
                    "low": min(values),
                    "high": max(values),
                    "milliseconds": latency[kind]["p50"],
                    "baseline": f"none: 16 processes, {seconds:g} s",
                    "unit": f"{what} per second",
                }
            )
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description="Load on one registry.")
    options.add_argument("--on", choices=("sqlite", "postgresql"), default="sqlite")
    options.add_argument("--processes", type=int, default=16)
    options.add_argument("--seconds", type=float, default=120.0)
    chosen = options.parse_args()
    found = load(chosen.on, chosen.processes, chosen.seconds)
    print(json.dumps({"database": chosen.on, **found}, indent=2))


if __name__ == "__main__":
    main()
