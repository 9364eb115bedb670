"""Many processes submit, claim, write and read one registry; nothing may be lost or doubled.

    python tests/benchmarks/registry_load.py                        16 processes, 120 s, SQLite
    python tests/benchmarks/registry_load.py --on postgresql        the same on a server of its own
    python tests/benchmarks/registry_load.py --processes 4 --seconds 5

Prints calls per second and latencies of every kind of call, in milliseconds, as JSON. Ends with an
error where a call failed, a run was claimed twice, or a value that was written is not there.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rlx_registry import Registry

sys.path.insert(0, str(Path(__file__).parents[1]))
from postgres import server

SUBMISSION: dict[str, Any] = {
    "name": "load", "spec": {"steps": 3}, "yaml": "name: load\n", "plugins": [], "code": {},
    "environment": {},
}  # fmt: skip
STEPS, METRICS = 3, 40


class Timer:
    """Seconds of every call, by its kind."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.spent[kind].append(time.perf_counter() - begin)


def work(url: str, number: int, start: float, seconds: float) -> tuple[list[str], dict[str, Any]]:
    """One process: submits a run of its own and one of everybody's, claims, writes, reads."""
    timed, claimed, turn = Timer(), [], 0
    with Registry.open(url) as registry:
        time.sleep(max(0.0, start - time.time()))
        while time.time() < start + seconds:
            turn += 1
            for digest in (f"{number}-{turn}", f"shared-{turn // 4}"):
                with timed("submit"):
                    registry.submit(digest=digest, seed=0, **SUBMISSION)
            with timed("claim"):
                run = registry.claim(["submitted"])
            if run is None:
                continue
            claimed.append(run.id)
            writer = registry.as_writer(run.id, run.attempt)
            for step in range(STEPS):
                with timed("write"):
                    writer.add_metrics(run.id, step, {f"m{i}": float(i) for i in range(METRICS)})
                with timed("heartbeat"):
                    writer.heartbeat(run.id)
                with timed("read"):
                    registry.metrics(run.id)
            with timed("list"):
                registry.runs(limit=20)
            with timed("end"):
                writer.transition(run.id, ["running"], "finished")
    return claimed, timed.spent


def measure(url: str, processes: int, seconds: float) -> dict[str, Any]:
    """Runs the load and checks what it left."""
    Registry.open(url).close()
    start = time.time() + 0.5 + processes * 0.3
    with get_context("spawn").Pool(processes) as pool:
        tasks = [(url, number, start, seconds) for number in range(processes)]
        done = pool.starmap(work, tasks, chunksize=1)
    claims = Counter(run for claimed, _ in done for run in claimed)
    doubled = [run for run, times in claims.items() if times > 1]
    assert not doubled, f"claimed twice: {doubled}"
    with Registry.open(url, read_only=True) as registry:
        runs = registry.runs()
        submitted = Counter((run.digest, run.seed) for run in runs)
        # A shared run that has finished still stands for its digest: one row each, whatever came.
        assert set(submitted.values()) == {1}, "one experiment has two runs"
        for run in claims:
            after = [change.after for change in registry.history(run)]
            assert after == ["submitted", "running", "finished"], (run, after)
            series = registry.metrics(run)
            assert {len(points) for points in series.values()} == {STEPS}, run
            assert len(series) == METRICS, run
    spent = {k: [t for _, each in done for t in each.get(k, [])] for k in done[0][1]}
    return {
        "processes": processes,
        "seconds": seconds,
        "runs": len(runs),
        "claimed": len(claims),
        "calls": {kind: figures(times, seconds) for kind, times in spent.items()},
    }


def figures(times: list[float], seconds: float) -> dict[str, float]:
    """Calls per second, and how long the middle one, one in a hundred and the slowest took."""
    ms = sorted(1e3 * t for t in times)
    return {
        "per_second": round(len(ms) / seconds, 1),
        "p50": round(statistics.median(ms), 2),
        "p99": round(ms[min(len(ms) - 1, len(ms) * 99 // 100)], 2),
        "max": round(ms[-1], 2),
    }


def main() -> None:
    options = argparse.ArgumentParser(description="Load on one registry.")
    options.add_argument("--on", choices=("sqlite", "postgresql"), default="sqlite")
    options.add_argument("--processes", type=int, default=16)
    options.add_argument("--seconds", type=float, default=120.0)
    chosen = options.parse_args()
    if chosen.on == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            url = f"sqlite:///{folder}/registry.db"
            found = measure(url, chosen.processes, chosen.seconds)
    else:
        with server(settings=()) as running:  # with fsync, as a real one has it
            url = running.url(running.create())
            found = measure(url, chosen.processes, chosen.seconds)
    print(json.dumps({"database": chosen.on, **found}, indent=2))


if __name__ == "__main__":
    main()
