"""A registry as large as a team's after a year, from a seed, for the dashboard to show.

    python tests/benchmarks/large_registry.py FOLDER        1,000 runs, about 2 GB, some minutes

It is made by `Registry.open`; what takes long one by one is inserted table by table. One run is
very long, one has as many steps as are drawn point by point, and one has a step as large as those
of a GPU, whose body is made by what makes every run's.
"""

import hashlib
import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, Table, insert

from rlx.checks import read_spec
from rlx.discovery import resolve_plugins
from rlx_registry import Registry, models, write_body
from rlx_registry.queries import EXACT

sys.path.insert(0, str(Path(__file__).parents[1]))
import sampled

__all__ = ["BIG_STEP", "EXACT_RUN", "LARGE", "LONG_RUN", "ORDINARY", "Size", "build", "freshen"]

ROOT = Path(__file__).parents[2]
ORDINARY, LONG_RUN, EXACT_RUN = 1, 2, 3
"""Runs by number."""
BIG_STEP = 7
"""Step of the ordinary run that has a body."""
METRICS = (
    *(f"rewards/{name}/{figure}" for name in ("accuracy", "brier", "format_score", "overlong")
      for figure in ("mean", "std")),
    *("train/reward_answer", "train/reward_confidence", "train/reward_answer_std"),
    *("train/reward_confidence_std", "score/total_score", "score/token_level_scores"),
    *("score/seed_returns_score", "score/total_score_std", "score/lost"),
    *(f"rollout/{name}_{turn}" for turn in ("answer", "confidence")
      for name in ("len", "truncated", "zero_signal")),
    *("rollout/no_span", "rollout/dropped", "rollout/filtered"),
    *("train/advantage_abs_answer", "train/advantage_abs_confidence", "train/loss", "train/lr"),
    *("train/entropy", "train/span_entropy", "train/kl", "train/kl_loss", "train/clip_frac"),
    *("train/ratio_max", "train/grad_norm", "kl/reference", "kl/beta"),
    *("calibration/brier", "calibration/conf_mean", "calibration/gap", "calibration/corr"),
    *("calibration/conf_spread", "calibration/alike_share"),
    *("perf/step_s", "perf/rollout_s", "perf/reward_s", "perf/train_s", "perf/record_s"),
    *("perf/tokens_per_s", "perf/shared_prefix_ratio", "health/skipped_update"),
    *("health/scorer_faults", "sampler/drift_mean", "sampler/drift_max", "critic/loss"),
    *("critic/value", "critic/grad_norm", "critic/explained_variance"),
)  # fmt: skip
EVALUATED = ("accuracy", "brier", "ece", "auroc", "mean_confidence", "alike_share")
SPECS = ("rlcr", "kg", "countdown")
GROUP = 16
"""Runs that were submitted together."""
STATUSES = ("finished",) * 7 + ("failed", "stopped", "finished")


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything; a recorded run has as many rollout rows as `rlcr.yaml` makes.

    Attributes:
        steps: of an ordinary run; `long_steps` of the long one, which has rollouts of each.
        big_rows, big_tokens: of the step that has a body.
        recorded: runs with rollouts, of `recorded_steps` steps with `rows` rows each.
    """

    runs: int = 1000
    steps: int = 157
    long_steps: int = 10_000
    seeds: int = 4
    recorded: int = 10
    recorded_steps: int = 124
    rows: int = 640
    long_rows: int = 16
    big_rows: int = 1024
    big_tokens: int = 1000


LARGE = Size()


def build(folder: Path, size: Size = LARGE, seed: int = 0) -> str:
    """Returns the URL of the registry of that size in a folder, made where it is not there yet."""
    wanted = json.dumps([asdict(size), seed, METRICS, hashlib.sha256(_source()).hexdigest()])
    done, url = folder / "done.json", f"sqlite:///{folder}/registry.db"
    if done.exists() and done.read_text() == wanted:
        return url
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    with Registry.open(url) as registry:
        write = registry.database.open_writer
        with write() as connection:
            _runs(connection, folder, size, rng)
        for run in range(1, size.runs + 1):
            with write() as connection:
                _metrics(connection, run, size, rng)
        with write() as connection:
            _evaluations(connection, size, rng)
            _events(connection, size)
            _plugins(connection)
        for run, steps, rows in _recorded(size):
            with write() as connection:
                _rollouts(connection, run, steps, rows, rng)
        _big_step(registry, folder, size, rng)
        with registry.database._writer.connect() as connection:  # type: ignore[union-attr]
            connection.exec_driver_sql("COMMIT")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.exec_driver_sql("BEGIN")
    done.write_text(wanted)
    return url


def freshen(url: str) -> None:
    """Lets those runs be alive that are running: a file cannot be, and two minutes pass soon."""
    with Registry.open(url) as registry:
        for run in registry.queries.supervised_runs():
            registry.heartbeat(run.id)


def _source() -> bytes:
    return b"".join(Path(file).read_bytes() for file in (__file__, sampled.__file__))


def _put(connection: Connection, table: Table, rows: Iterable[Sequence[Any]]) -> None:
    """Inserts rows that name their columns in the order of the table."""
    names = ", ".join(f'"{column.name}"' for column in table.c)
    places = ", ".join("?" * len(table.c))
    statement = f"INSERT INTO {table.name} ({names}) VALUES ({places})"
    rows = iter(rows)
    while some := list(itertools.islice(rows, 100_000)):
        connection.exec_driver_sql(statement, some)


def _began(run: int) -> float:
    """Runs were submitted every half hour, the last of them just now."""
    return 1.7e9 + 1800.0 * run


def _steps(run: int, size: Size) -> int:
    return {LONG_RUN: size.long_steps, EXACT_RUN: EXACT}.get(run, size.steps)


def _status(run: int, size: Size) -> str:
    if run in (LONG_RUN, size.runs):
        return "running"
    return "queued" if run == size.runs - 1 else STATUSES[run % len(STATUSES)]


def _runs(connection: Connection, folder: Path, size: Size, rng: np.random.Generator) -> None:
    read = [read_spec(ROOT / "experiments" / f"{name}.yaml") for name in SPECS]
    plugins = [resolve_plugins(one.spec).list_records() for one in read]
    rows, changes = [], []
    for run in range(1, size.runs + 1):
        recipe, one = run // size.seeds, read[run // size.seeds % len(read)]
        status, at = _status(run, size), _began(run)
        resolved = one.spec.dump_resolved() | {"recipe": recipe}
        rows.append(
            {
                "id": run,
                "name": f"{one.spec.name}-{recipe:03d}",
                "digest": hashlib.sha256(f"{one.spec.digest} {recipe}".encode()).hexdigest(),
                "seed": run % size.seeds,
                "status": status,
                "step": 0 if status == "queued" else _steps(run, size),
                "steps_total": _steps(run, size) + (100 if status == "running" else 0),
                "created": at,
                "started": None if status == "queued" else at + 9,
                "ended": None if status in ("queued", "running") else at + 5000,
                "reason": "rank 0 ended with 1" if status == "failed" else None,
                "directory": str(folder / "runs" / f"r-{run:04d}"),
                "attempt": 1,
                "heartbeat": time.time() if status == "running" else at + 5000,
                "pid": 4000 + run,
                "phase": "joint",
                "yaml": one.yaml,
                "spec": resolved,
                "plugins": plugins[recipe % len(read)],
                "code": {"version": "1", "digest": "d" * 64},
                "environment": {"python": "3.11.7", "packages": {f"p{i}": "1.0" for i in range(8)}},
                "host": f"node-{run % 7}",
                "request": None,
                "origins": one.origins,
            }
        )
        for after in ("submitted", "running", status):
            changes.append((None, run, at, None, after, None, 1))
    connection.execute(insert(models.run), rows)
    _put(connection, models.status_change, changes)
    joined = [(run, f"sweep-{run // GROUP:02d}", _began(run)) for run in range(1, size.runs + 1)]
    _put(connection, models.grouped, joined)
    keys = [f"eval/held_out/{name}" for name in EVALUATED]
    names = list(enumerate((*METRICS, *keys), 1))
    _put(connection, models.metric_key, names)


def _metrics(connection: Connection, run: int, size: Size, rng: np.random.Generator) -> None:
    """Every metric at every step, numbered as they would have been written, step by step."""
    steps, at = _steps(run, size), _began(run)
    names = len(METRICS)
    noise = rng.standard_normal((names, steps)) * 0.02
    level = np.linspace(0.2, 0.7, steps) + 0.1 * rng.standard_normal((names, 1))
    values = level + noise
    number, times = range(1, steps + 1), [at + 30.0 * step for step in range(steps)]
    _put(
        connection,
        models.metric,
        (
            row
            for key in range(names)
            for row in zip(
                itertools.repeat(run),
                itertools.repeat(key + 1),
                number,
                values[key].tolist(),
                times,
                range(key + 1, steps * names + 1, names),
            )
        ),
    )
    last = steps * names + 1
    held_out = [
        (run, names + 1 + i, step, 0.3 + 0.1 * i + step / 1e5, at, last + 2 * i + (step > 0))
        for i in range(len(EVALUATED))
        for step in (0, steps)
    ]
    _put(connection, models.metric, held_out)


def _evaluations(connection: Connection, size: Size, rng: np.random.Generator) -> None:
    payload = json.dumps(
        {
            "problem_ids": [f"countdown/{i % 20}-{i % 17}-{i % 13}={i % 97}" for i in range(600)],
            "strata": ["2 numbers", "3 numbers"] * 300,
            "correct": rng.integers(0, 2, 600).tolist(),
            "confidence": (rng.integers(0, 11, 600) / 10).tolist(),
        }
    )
    rows = []
    for run in range(1, size.runs + 1):
        for label, step in (("before", 0), ("after", _steps(run, size))):
            for suite in ("held_out", "larger"):
                figures = json.dumps(_figures(rng))
                at = _began(run) + step
                rows.append((run, step, label, suite, 500, figures, payload, at))
    _put(connection, models.evaluation, rows)


def _figures(rng: np.random.Generator) -> dict[str, Any]:
    """What an evaluation tells, with the bins of a reliability diagram and intervals."""
    told = {name: float(rng.uniform(0.1, 0.9)) for name in (*EVALUATED, "nll", "ece_mass", "aurc")}
    bins = [
        {
            "low": i / 10,
            "high": (i + 1) / 10,
            "n": int(rng.integers(1, 90)),
            "confidence": i / 10 + 0.05,
            "accuracy": float(rng.uniform()),
            "accuracy_low": 0.1,
            "accuracy_high": 0.9,
        }
        for i in range(10)
    ]
    intervals = {name: [value - 0.05, value + 0.05] for name, value in told.items()}
    return {"n": 500, **told, "intervals": intervals, "bins": bins}


def _events(connection: Connection, size: Size) -> None:
    rows = []
    for run in range(1, size.runs + 1):
        for i in range(_steps(run, size) if run == LONG_RUN else 10):
            level = "warning" if i % 9 == 0 else "info"
            message, payload = f"checkpoint of step {i}", json.dumps({"step": i})
            rows.append((None, run, _began(run) + 30 * i, "checkpoint", level, message, payload))
    _put(connection, models.event, rows)


def _plugins(connection: Connection) -> None:
    place = ("rlx", "1.0", "rlx_plugins.countdown:CountdownTask", "ok", "", _began(1))
    rows = [(f"node-{i % 3}", "rlx.tasks", place[0], f"task{i}", *place[1:]) for i in range(60)]
    _put(connection, models.plugin, rows)


def _recorded(size: Size) -> Iterator[tuple[int, int, int]]:
    """Runs with rollouts, how many steps of them, and how many rows a step."""
    yield LONG_RUN, size.long_steps, size.long_rows
    for run in (ORDINARY, *range(EXACT_RUN, size.recorded + 2)):
        yield run, size.recorded_steps, size.rows


def _rollouts(
    connection: Connection, run: int, steps: int, rows: int, rng: np.random.Generator
) -> None:
    """Index rows: four answers of a problem, below each one confidence."""
    statistics = {"phase": "joint", "rows": rows, "tokens": 100 * rows, "beta": 0.001}
    statistics |= {"state_before": {}, "state": {}, "max_tokens": {"answer": 512}}
    text, digest = json.dumps(statistics), "0" * 64
    places = [
        (run, step, f"rollouts/step_{step:06d}.parquet", digest, 90_000, text, _began(run))
        for step in range(1, steps + 1)
    ]
    _put(connection, models.rollout_step, places)
    score = json.dumps({"total_score": 0.25, "token_level_scores": 0.25})
    rewards = [json.dumps({"accuracy": float(x), "format_score": 1.0}) for x in (0, 1)]
    preview = ["<think> 8 + 11 = 19, and 19 - 5 = 14. </think><answer> 8+11-5 </answer>" * 2] * 2
    chance = rng.random((steps, rows)) < 0.5
    advantages = rng.standard_normal((steps, rows)).tolist()

    def of_step(step: int) -> Iterator[tuple[Any, ...]]:
        right = chance[step - 1].tolist()
        for row in range(rows):
            tree, parent = row // 8, row - 1 if row % 2 else None
            good, advantage = right[row], advantages[step - 1][row] if tree % 5 else 0.0
            yield (
                *(run, step, row, parent, tree, 2 * tree + row % 2),
                "confidence" if row % 2 else "answer",
                f"countdown/{(step * rows // 8 + tree) % 5000}",
                *(float(good), rewards[good], advantage, 100, "stop", preview[good]),
                *(None if good else "accuracy: wrong answer", score),
            )

    steps_of = (row for step in range(1, steps + 1) for row in of_step(step))
    _put(connection, models.rollout, steps_of)


def _big_step(registry: Registry, folder: Path, size: Size, rng: np.random.Generator) -> None:
    table, index = sampled.body(size.big_rows, size.big_tokens, rng)
    path = folder / "runs" / f"r-{ORDINARY:04d}" / "rollouts" / f"step_{BIG_STEP:06d}.parquet"
    digest, length = write_body(path, table)
    statistics = {"phase": "joint", "rows": size.big_rows, "beta": 0.001}
    place = {"path": path, "sha256": digest, "bytes": length, "statistics": statistics}
    registry.results.add_rollouts(str(ORDINARY), BIG_STEP, **place, index=index)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]).absolute()))
