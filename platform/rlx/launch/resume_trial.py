"""Kills runs and compares every record of them with those of an uninterrupted run."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rlx.errors import RlxError, SpecError
from rlx.launch.lifecycle import watch_run
from rlx.launch.processes import is_supervisor, list_live_ranks
from rlx.launch.run_access import locate_run_folder
from rlx.progress import Report, log_report, read_progress
from rlx_registry import ENDED, Registry, RunRecord, read_body

VICTIMS = ("rank", "supervisor", "scorer")
RLX = (sys.executable, "-c", "import sys; from rlx.cli import main; sys.exit(main())")
RUN_TIME_LIMIT = 1800.0
"""Seconds that a run may take; without a limit, a run lost for good would block forever."""
START = 2.0
"""Seconds after it has begun in which a process counts as starting."""


class KillResult(NamedTuple):
    """A killed run: the victim, the work that it was killed during, and the differences found."""

    run: str
    victim: str
    work: str
    found: tuple[str, ...]


def run_resume_trial(
    spec: Path,
    home: Path,
    *,
    overrides: Sequence[str] = (),
    kills: int = 4,
    at_once: int = 1,
    seed: int = 0,
    registry: str | None = None,
    report: Report = log_report,
) -> list[KillResult]:
    """Runs an experiment uninterrupted, then with kills, and compares every number except times.

    Every other process is killed while it starts. A run whose supervisor is killed is resumed by
    `rlx resume`; others go on by themselves.

    Args:
        home: empty folder for the runs; the caller removes it.
        kills: number of runs, each killed once.
        at_once: runs at a time; as many run beside the uninterrupted one.
        seed: of the times of the kills.
        registry: URL of an empty registry; None makes a SQLite file in `home`.

    Raises:
        SpecError: the registry has runs.
        RlxError: the uninterrupted run fails, or a run does not end.
    """
    url = registry or f"sqlite:///{home}/registry.db"
    with Registry.open(url) as made:
        if made.runs(limit=1):
            raise SpecError("the registry has runs: use an empty one")
    trial = _KillTrial(home, url, spec.absolute(), overrides)
    rng = random.Random(seed)
    try:
        reference, *_ = whole = [trial.submit() for _ in range(at_once)]
        length = max(trial.measure_run(trial.wait_for_end(run)) for run in whole)
        if trial.read_run(reference).status != "finished":
            raise RlxError(f"{reference} failed unbroken: {trial.read_run(reference).reason}")
        report(f"unbroken    {reference}  {length:.0f} s")
        moments = [rng.random() * (START if n % 2 else length) for n in range(kills)]

        def kill_one(number: int) -> KillResult:
            victim = VICTIMS[number % len(VICTIMS)]
            return trial.kill_run(reference, victim, bool(number % 2), moments[number])

        done = []
        with ThreadPoolExecutor(at_once) as pool:
            for one in pool.map(kill_one, range(kills)):
                done.append(one)
                found = "; ".join(one.found[:3]) or "every number is the same"
                report(f"{one.victim:<11} {one.run}  {one.work}: {found}")
        return done
    finally:  # after an aborted trial; ranks exit by themselves
        trial.kill_supervisors()


@dataclass(frozen=True, slots=True)
class _KillTrial:
    """Runs of an experiment in a home and a registry of their own."""

    home: Path
    url: str
    spec: Path
    overrides: Sequence[str]

    def submit(self) -> str:
        sets = [f"--set={one}" for one in ("tracking.mlflow=null", *self.overrides)]
        return self.call_rlx("submit", str(self.spec), "--again", "-dq", *sets)

    def call_rlx(self, *arguments: str) -> str:
        """Runs an rlx command in the trial's home; returns what it printed."""
        environment = {**os.environ, "RLX_HOME": str(self.home), "RLX_REGISTRY": self.url}
        done = subprocess.run(
            [*RLX, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = f"ended with {done.returncode}: {done.stderr[-2000:]}"
            raise RlxError(f"rlx {arguments[0]} {said}")
        return done.stdout.strip()

    def read_run(self, run_id: str) -> RunRecord:
        with Registry.open(self.url, read_only=True) as registry:
            return registry.run(run_id)

    def wait_for_end(self, run_id: str) -> RunRecord:
        try:
            return watch_run(run_id, self.url, timeout=RUN_TIME_LIMIT)
        except TimeoutError as error:
            raise RlxError(str(error)) from None

    def measure_run(self, run: RunRecord) -> float:
        """Seconds that a run took, without the warm start, which later runs load."""
        with Registry.open(self.url, read_only=True) as registry:
            rows = registry.results.metric_rows_after(run.id, 0, limit=1000)
        trained = [row.at for row in rows if row.name == "warm_start/loss"] or [run.created]
        return (run.ended or run.created) - run.created - (max(trained) - min(trained))

    def kill_run(self, reference: str, victim: str, at_start: bool, moment: float) -> KillResult:
        """Submits a run, kills one of its processes so many seconds after it was submitted, or
        after the process has begun, and compares it. A run that ends before is repeated with an
        earlier kill.
        """
        run_id = self.submit()
        while at_start and not list(_list_victims(self.read_run(run_id), victim)):
            time.sleep(0.02)
        time.sleep(moment)
        while not _kill_one(run := self.read_run(run_id), victim):
            if run.status in ENDED:
                return self.kill_run(reference, victim, at_start, 0.8 * moment)
            time.sleep(0.02)
        stage = read_progress(locate_run_folder(run).progress)
        if victim == "supervisor" and self.read_run(run_id).status not in ENDED:
            self.call_rlx("resume", run_id, "-dq")
        self.wait_for_end(run_id)
        with Registry.open(self.url, read_only=True) as registry:
            found = tuple(find_run_differences(registry, reference, run_id))
        work = "starting" if stage is None else stage.stage
        if stage is not None and work.startswith("training"):
            work = stage.doing or "between steps"
        return KillResult(run_id, victim, work, found)

    def kill_supervisors(self) -> None:
        with Registry.open(self.url, read_only=True) as registry:
            for run in registry.runs():
                _kill_one(run, "supervisor")


def _kill_one(run: RunRecord, victim: str) -> bool:
    """Kills a process of the victim's kind; returns whether there is one."""
    for pid in _list_victims(run, victim):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _list_victims(run: RunRecord, victim: str) -> Iterator[int]:
    if victim == "supervisor":
        if run.pid is not None and is_supervisor(run.pid, run.id):
            yield run.pid
        return
    for pid in list_live_ranks(locate_run_folder(run).root):
        with suppress(psutil.Error):
            rank = psutil.Process(pid)
            if "torch.distributed.run" in rank.cmdline():  # it starts the ranks
                continue
            scorers = [c.pid for c in rank.children() if "spawn_main" in " ".join(c.cmdline())]
            yield from [pid] if victim == "rank" else scorers


OF_MACHINE = ("perf/", "sampler/restarts")
"""Beginnings of the names of metrics that tell of the machine and not of the experiment."""


def find_run_differences(registry: Registry, one: str, other: str) -> Iterator[str]:
    """Yields a sentence for each difference between two runs of one experiment, in metrics,
    evaluations with the result of every problem, recorded rollouts with all their token streams,
    and exported weights."""
    runs = registry.run(one), registry.run(other)
    for run in runs:
        if run.status != "finished":
            yield f"{run.id} is {run.status}: {run.reason}"
    first, second = (dict(_list_records(registry, run)) for run in runs)
    for what in dict.fromkeys((*first, *second)):
        values = first.get(what), second.get(what)
        if values[0] != values[1]:
            plain = all(value is None or isinstance(value, float | str) for value in values)
            yield f"{what}: {values[0]} and {values[1]}" if plain else f"{what} differs"


def _list_records(registry: Registry, run: RunRecord) -> Iterator[tuple[str, Any]]:
    folder, results = locate_run_folder(run).root, registry.results
    for name, points in results.metrics(run.id).items():
        if not name.startswith(OF_MACHINE):
            for step, value in points:
                yield f"metric {name} at step {step}", value
    for e in results.evaluations(run.id):
        yield f"evaluation {e.suite} ({e.label}, step {e.step})", (e.metrics, e.payload)
    for step in results.rollout_steps(run.id):
        body = results.rollout_body(run.id, step)
        table = read_body(folder / body.path, body.sha256)
        yield f"the statistics of step {step}", body.statistics
        yield f"the index of step {step}'s rollouts", results.rollout_index(run.id, step)
        for column in table.column_names:
            yield f"{column} of the rollouts of step {step}", table[column]
    weights, digest = folder / "model" / "model.safetensors", f"missing in {run.id}"
    if weights.exists():
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    yield "exported weights", digest
