"""Kills runs and compares every record of them with those of an uninterrupted run."""

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
from uuid import uuid4

import psutil

from rlx.errors import RlxError, SpecError
from rlx.launch.processes import is_supervisor, list_live_ranks
from rlx.launch.run_access import locate_run_folder
from rlx.launch.start_stop import watch_run
from rlx.progress import Report, ShowProgress, ignore_progress, log_report, read_progress
from rlx.record import open_senders
from rlx_registry import ENDED, Registry, RunRecord, read_body

VICTIMS = ("rank", "supervisor", "scorer")


RLX = (sys.executable, "-c", "import sys; from rlx.cli import main; sys.exit(main())")


RUN_TIME_LIMIT = 1800.0
"""Seconds that a run may take; without a limit, a run lost for good would block forever."""


START = 2.0
"""Seconds after it has begun in which a process counts as starting."""


class Kill(NamedTuple):
    """A process to kill: of which kind, and how many seconds after its run was submitted, or after
    it has begun itself."""

    victim: str
    at_start: bool
    moment: float


class KillResult(NamedTuple):
    """A killed run: the kill, during which work, and the differences found."""

    run: str
    kill: Kill
    work: str
    found: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResumeTrialReport:
    """What a trial has found: its kills in order, and of how many runs a tracker lacks records."""

    kills: tuple[KillResult, ...]
    unequal: int

    @property
    def differing(self) -> tuple[KillResult, ...]:
        """The killed runs whose numbers differ."""
        return tuple(kill for kill in self.kills if kill.found)


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
    show: ShowProgress = ignore_progress,
) -> ResumeTrialReport:
    """Runs an experiment uninterrupted, then with kills, and compares every number except times.

    Every other process is killed while it starts, so that six kills end each kind of process in
    both ways. A run whose supervisor is killed is resumed by `rlx resume`; others go on by
    themselves.

    Args:
        spec: file of the experiment.
        home: empty folder for the runs; the caller removes it.
        overrides: `path=value`, as of `--set`.
        kills: number of runs, each killed once.
        at_once: runs at a time; as many run beside the uninterrupted one.
        seed: of the times of the kills.
        registry: URL of an empty registry; None makes a SQLite file in `home`.
        report: called with each run that has ended.
        show: called with the number of runs that have ended.

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
        show(0, kills + 1)
        reference, *_ = whole = [trial.submit() for _ in range(at_once)]
        length = max(trial.measure_run(trial.wait_for_end(run)) for run in whole)
        if trial.read_run(reference).status != "finished":
            raise RlxError(f"{reference} failed unbroken: {trial.read_run(reference).reason}")
        report(f"unbroken    {reference}  {length:.0f} s")
        done = []
        with ThreadPoolExecutor(at_once) as pool:
            plan = plan_kills(kills, length, rng)
            for one in pool.map(lambda kill: trial.kill_run(reference, kill), plan):
                done.append(one)
                found = "; ".join(one.found[:3]) or "every number is the same"
                victim, at_start, moment = one.kill
                since = "after its start" if at_start else "of the run"
                report(f"{victim:<11} {one.run}  {moment:5.1f} s {since}  {one.work}: {found}")
                show(1 + len(done), stage="killed runs")
        return ResumeTrialReport(tuple(done), trial.count_untracked_runs(report))
    finally:  # after an aborted trial; ranks exit by themselves
        trial.kill_supervisors()


def plan_kills(count: int, length: float, rng: random.Random) -> list[Kill]:
    """Draws kills: of the kinds of process in turn, and every other one at a process's start.

    Args:
        length: seconds that a run takes.
    """
    kills = []
    for number in range(count):
        at_start = number % 2 == 1
        moment = rng.random() * (START if at_start else length)
        kills.append(Kill(VICTIMS[number % len(VICTIMS)], at_start, moment))
    return kills


@dataclass(frozen=True, slots=True)
class _KillTrial:
    """Runs of an experiment in a home and a registry of their own."""

    home: Path
    url: str
    spec: Path
    overrides: Sequence[str]

    def submit(self, store: str = "mlflow") -> str:
        """Submits a run that is sent to an MLflow store of this name; returns its id."""
        mlflow = f"tracking.mlflow=sqlite:///{self.home}/{store}.db"
        sets = (mlflow, *self.overrides)
        return self.call_rlx(
            "submit", str(self.spec), "--again", "-dq", *(f"--set={one}" for one in sets)
        )

    def call_rlx(self, *arguments: str) -> str:
        """Runs an rlx command in the trial's home; returns what it printed."""
        environment = {**os.environ, "RLX_HOME": str(self.home), "RLX_REGISTRY": self.url}
        done = subprocess.run(
            [*RLX, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RlxError(
                f"rlx {arguments[0]} ended with {done.returncode}: {done.stderr[-2000:]}"
            )
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

    def kill_run(self, reference: str, kill: Kill) -> KillResult:
        """Submits a run, kills one of its processes, and compares it.

        A run that ends before its victim is there is repeated with an earlier kill. A supervisor
        first creates MLflow's store if there is none; each that is killed has its own to create.
        """
        victim = kill.victim
        run_id = self.submit(f"mlflow-{uuid4()}" if victim == "supervisor" else "mlflow")
        if kill.at_start:
            while not list(_list_victims(self.read_run(run_id), victim)):
                time.sleep(0.02)
        time.sleep(kill.moment)
        while not _kill_one(run := self.read_run(run_id), victim):
            if run.status in ENDED:
                return self.kill_run(reference, kill._replace(moment=0.8 * kill.moment))
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
        return KillResult(run_id, kill, work, found)

    def count_untracked_runs(self, report: Report) -> int:
        """Sends trackers what they missed; returns how many runs of trackers still lack records."""
        with Registry.open(self.url, read_only=True) as registry:
            runs = registry.runs()
            for pid in filter(None, map(_find_supervisor, runs)):  # they send the ends of runs
                try:
                    psutil.Process(pid).wait(RUN_TIME_LIMIT)
                except psutil.NoSuchProcess:
                    continue
                except psutil.TimeoutExpired as error:
                    raise RlxError(f"a supervisor does not end: {error}") from None
            senders = [sender for run in runs for sender in open_senders(registry, run)]
            self.call_rlx("check", "--repair")
            unequal = sum(sender.is_behind for sender in senders)
        report(f"trackers have all records of {len(senders) - unequal} of {len(senders)} runs")
        return unequal

    def kill_supervisors(self) -> None:
        with Registry.open(self.url, read_only=True) as registry:
            for pid in filter(None, map(_find_supervisor, registry.runs())):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _find_supervisor(run: RunRecord) -> int | None:
    return run.pid if run.pid is not None and is_supervisor(run.pid, run.id) else None


def _kill_one(run: RunRecord, victim: str) -> bool:
    """Kills a process of the victim's kind; returns False if there is none."""
    for pid in _list_victims(run, victim):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _list_victims(run: RunRecord, victim: str) -> Iterator[int]:
    if victim == "supervisor":
        yield from filter(None, [_find_supervisor(run)])
        return
    for pid in list_live_ranks(locate_run_folder(run).root):
        with suppress(psutil.Error):
            rank = psutil.Process(pid)
            if "torch.distributed.run" in rank.cmdline():  # it starts the ranks
                continue
            scorers = [c.pid for c in rank.children() if "spawn_main" in " ".join(c.cmdline())]
            yield from [pid] if victim == "rank" else scorers


OF_MACHINE = ("perf/", "sampler/restarts")
"""Beginnings of the names of metrics that tell of the machine and not of the experiment: timings,
and how often a process of the sampler was lost."""


def find_run_differences(registry: Registry, one: str, other: str) -> Iterator[str]:
    """Yields a sentence for each difference between two runs of one experiment.

    Compares metrics, evaluations with the result of every problem, recorded rollouts with all
    their token streams, and the exported weights.
    """
    first, second = registry.run(one), registry.run(other)
    for run in (first, second):
        if run.status != "finished":
            yield f"{run.id} is {run.status}: {run.reason}"
    yield from _compare_metrics(registry, one, other)
    yield from _compare_evaluations(registry, one, other)
    yield from _compare_rollouts(registry, first, second)
    weights = [(_get_run_directory(run) / "model" / "model.safetensors") for run in (first, second)]
    if all(path.exists() for path in weights):
        if weights[0].read_bytes() != weights[1].read_bytes():
            yield "the exported weights differ"
    else:
        yield "exported weights are missing"


def _get_run_directory(run: RunRecord) -> Path:
    if run.directory is None:
        raise ValueError(f"{run.id} has no folder")
    return Path(run.directory)


def _compare_metrics(registry: Registry, one: str, other: str) -> Iterator[str]:
    found = [
        {
            name: points
            for name, points in registry.results.metrics(run).items()
            if not name.startswith(OF_MACHINE)
        }
        for run in (one, other)
    ]
    for name in sorted({*found[0], *found[1]}):
        pairs = [dict(series.get(name, ())) for series in found]
        steps = sorted({*pairs[0], *pairs[1]})
        odd = [s for s in steps if pairs[0].get(s) != pairs[1].get(s)]
        if odd:
            values = [series.get(odd[0]) for series in pairs]
            yield f"metric {name} at step {odd[0]}: {values[0]} and {values[1]}"


def _compare_evaluations(registry: Registry, one: str, other: str) -> Iterator[str]:
    found: list[dict[Any, Any]] = [
        {
            (e.step, e.label, e.suite): (e.metrics, e.payload)
            for e in registry.results.evaluations(run)
        }
        for run in (one, other)
    ]
    for place in sorted({*found[0], *found[1]}):
        step, label, suite = place
        if any(place not in evaluations for evaluations in found):
            yield f"evaluation {suite} ({label}, step {step}) is missing in one of them"
        elif found[0][place] != found[1][place]:
            yield f"evaluation {suite} ({label}, step {step}) differs"


def _compare_rollouts(registry: Registry, first: RunRecord, second: RunRecord) -> Iterator[str]:
    runs = (first, second)
    steps = [registry.results.rollout_steps(run.id) for run in runs]
    if steps[0] != steps[1]:
        yield f"rollouts are recorded for {len(steps[0])} and {len(steps[1])} steps"
    for step in sorted({*steps[0]} & {*steps[1]}):
        bodies = [registry.results.rollout_body(run.id, step) for run in runs]
        if bodies[0].statistics != bodies[1].statistics:
            yield f"the statistics of step {step} differ"
        tables = [
            read_body(_get_run_directory(run) / body.path, body.sha256)
            for run, body in zip(runs, bodies, strict=True)
        ]
        if not tables[0].equals(tables[1]):
            names = [n for n in tables[0].column_names if not tables[0][n].equals(tables[1][n])]
            yield f"the rollouts of step {step} differ in {', '.join(names)}"
        indices = [registry.results.rollout_index(run.id, step) for run in runs]
        if indices[0] != indices[1]:
            yield f"the index of step {step}'s rollouts differs"
