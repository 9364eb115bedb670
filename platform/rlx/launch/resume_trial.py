"""Kills runs and compares their records with an uninterrupted run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from rlx.errors import RlxError, SpecError
from rlx.launch.processes import is_supervisor, list_live_ranks
from rlx.launch.run_access import locate_run_folder
from rlx.record import RunSender, find_run_differences, open_trackers
from rlx.reporting import Report, ShowProgress, ignore_progress, log_report
from rlx.run import read_progress
from rlx.stopwatch import Stopwatch
from rlx_registry import Registry, RunRecord

VICTIMS = ("rank", "supervisor", "scorer")
ENDS = ("finished", "failed", "stopped")
RLX = (sys.executable, "-c", "import sys; from rlx.cli import main; sys.exit(main())")
WARM_START_ROWS = 1000
"""Metric values of a run that are looked through for its warm start, which come first."""
RUN_TIME_LIMIT = 1800.0
"""Seconds that a run may take; without a limit, a run lost for good would block forever."""
STRIKE_INTERVAL = 0.02
"""Seconds between two attempts to find a process to kill."""


class KillResult(NamedTuple):
    """A killed run: the process killed, when, during which work, and the differences found."""

    run: str
    victim: str
    moment: float
    work: str
    found: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResumeTrialReport:
    """What a trial has found.

    Attributes:
        kills: one per killed run, in the order in which the runs were planned.
        unequal: number of runs of which a tracker lacks records.
    """

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

    A run whose supervisor is killed is resumed by `rlx resume`; others go on by themselves.

    Args:
        spec: file of the experiment.
        home: empty folder for the runs; the caller removes it.
        overrides: `path=value`, as of `--set`.
        kills: number of runs, each killed once.
        at_once: runs at a time.
        seed: of the times of the kills.
        registry: URL of an empty registry; None makes a SQLite file in `home`.
        report: called with each run that has ended.
        show: called with the number of runs that have ended.

    Raises:
        SpecError: the registry has runs.
        RlxError: the uninterrupted run fails, or a run does not end.
    """
    with _KillTrial(home, spec, overrides, registry, at_once, report) as trial:
        show(0, kills + 1)
        unbroken = trial.run_unbroken()
        done = []
        for kill in trial.kill(unbroken, kills, random.Random(seed)):
            done.append(kill)
            show(1 + len(done), stage="killed runs")
        return ResumeTrialReport(tuple(done), trial.compare_with_trackers())


class _KillTrial:
    """A separate RLX_HOME in which runs are submitted and killed."""

    def __init__(
        self,
        home: Path,
        spec: Path,
        overrides: Sequence[str],
        url: str | None,
        at_once: int,
        report: Report,
    ) -> None:
        self._report, self._at_once = report, at_once
        self._url = url or f"sqlite:///{home}/registry.db"
        self._environment = {**os.environ, "RLX_HOME": str(home), "RLX_REGISTRY": self._url}
        sets = [word for value in overrides for word in ("--set", value)]
        self._submit = ["submit", str(spec.absolute()), "--again", "-dq"]
        self._sets = [*sets, "--set", "tracking.pictures=false"]
        self._length = 0.0
        self._runs: list[str] = []

    def __enter__(self) -> "_KillTrial":
        with Registry.open(self._url) as registry:
            if registry.runs(limit=1):
                raise SpecError("the registry has runs: use an empty one")
        return self

    def __exit__(self, *_: object) -> None:
        with self._registry() as registry:  # after an aborted trial; ranks exit by themselves
            for run in map(registry.run, self._runs):
                if run.pid is not None and is_supervisor(run.pid, run.id):
                    os.kill(run.pid, signal.SIGKILL)

    def _registry(self) -> Registry:
        return Registry.open(self._url, read_only=True)

    def _start(self, store: str = "mlflow") -> str:
        """Submits a run, mirrored to an MLflow store of this name, and returns its id."""
        mirror = ["--set", f"tracking.mlflow=sqlite:///{{home}}/{store}.db"]
        run_id = self._call_rlx(*self._submit, *mirror, *self._sets).strip()
        self._runs.append(run_id)
        return run_id

    def _call_rlx(self, verb: str, *arguments: str) -> str:
        """Runs an rlx command in the trial's home; returns what it printed."""
        done = subprocess.run(
            [*RLX, verb, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RlxError(f"rlx {verb} ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def run_unbroken(self) -> str:
        """Runs the reference without kills, beside as many runs as later; returns its id."""
        runs = [self._start() for _ in range(self._at_once)]
        self._length = max(self._wait_for_end(run) for run in runs)
        with self._registry() as registry:
            if registry.run(runs[0]).status != "finished":
                raise RlxError(f"{runs[0]} failed unbroken: {registry.run(runs[0]).reason}")
        self._report(f"unbroken    {runs[0]}  {self._length:.0f} s")
        return runs[0]

    def kill(self, unbroken: str, kills: int, drawn: random.Random) -> Iterator[KillResult]:
        """Runs `kills` runs and kills each once; yields them in order."""
        plan = [(VICTIMS[n % len(VICTIMS)], drawn.random()) for n in range(kills)]
        with ThreadPoolExecutor(self._at_once) as pool:
            yield from pool.map(lambda one: self._run_and_kill(unbroken, *one), plan)

    def _run_and_kill(self, unbroken: str, victim: str, share: float) -> KillResult:
        """Starts a run and kills its victim after a share of the last measured duration.

        The duration is updated, since it varies with the load of the machine. A run that ends
        before its victim can be killed is repeated. A supervisor first creates MLflow's store if
        there is none; one that will be killed gets a store of its own to create.
        """
        own_store = victim == "supervisor"
        run_id = self._start(f"mlflow-{len(self._runs)}" if own_store else "mlflow")
        moment = share * self._length
        with self._registry() as registry:
            folder = locate_run_folder(registry.run(run_id))
            time.sleep(moment)
            while not _strike(registry, run_id, victim, folder.root):
                if registry.run(run_id).status in ENDS:
                    self._length = self._wait_for_end(run_id)
                    return self._run_and_kill(unbroken, victim, share)
                time.sleep(STRIKE_INTERVAL)
            stage = read_progress(folder.progress)
            if victim == "supervisor" and registry.run(run_id).status not in ENDS:
                self._call_rlx("resume", run_id, "-dq")
        spent = self._wait_for_end(run_id)
        with self._registry() as registry:
            found = tuple(find_run_differences(registry, unbroken, run_id))
            attempts = registry.history(run_id)[-1].attempt
        if attempts == 1:
            self._length = spent
        work = "starting" if stage is None else stage.stage
        if stage is not None and stage.stage.startswith("training"):
            work = stage.doing or "between steps"
        outcome = "; ".join(found[:3]) or "every number is the same"
        self._report(
            f"{victim:<11} {run_id}  at {moment:5.1f} s  {work:<20} "
            f"{attempts} attempt{'s' if attempts > 1 else ''}: {outcome}"
        )
        return KillResult(run_id, victim, moment, work, found)

    def compare_with_trackers(self) -> int:
        """Sends trackers what they missed; returns of how many runs they still lack records."""
        with self._registry() as registry:
            runs = [registry.run(run_id) for run_id in self._runs]
            pairs = [(run.id, one) for run in runs for one in open_trackers(registry, run)]
            senders = [RunSender(registry, *pair) for pair in pairs]
            for run in runs:  # supervisors may still be telling MLflow the end of their runs
                self._wait(
                    registry,
                    run.id,
                    lambda run: run.pid is None or not is_supervisor(run.pid, run.id),
                )
            behind = sum(sender.is_behind for sender in senders)
            self._call_rlx("check", "--repair")
            unequal = sum(sender.is_behind for sender in senders)
        self._report(
            f"MLflow has all records of {len(senders) - unequal} of {len(senders)} runs "
            f"({behind} completed by `rlx check --repair`)"
        )
        return unequal

    def _wait_for_end(self, run_id: str) -> float:
        """Waits until the run ends; returns the seconds since it was submitted.

        A warm start that the run trained does not count: later runs load it.
        """
        with self._registry() as registry:
            self._wait(registry, run_id, lambda run: run.status in ENDS)
            run = registry.run(run_id)
            rows = registry.results.metric_rows_after(run_id, 0, limit=WARM_START_ROWS)
        trained = [row.at for row in rows if row.name == "warm_start/loss"] or [run.created]
        return (run.ended or run.created) - run.created - (max(trained) - min(trained))

    def _wait(self, registry: Registry, run_id: str, until: Callable[[RunRecord], bool]) -> None:
        stopwatch = Stopwatch(longest=1.0)  # a pause of this process does not count
        while not until(registry.run(run_id)):
            if stopwatch.look() > RUN_TIME_LIMIT:
                raise RlxError(f"{run_id} has not ended in {RUN_TIME_LIMIT:.0f} s")
            time.sleep(0.1)


def _strike(registry: Registry, run_id: str, victim: str, folder: Path) -> bool:
    """Kills a process of the victim's kind; returns False if there is none."""
    for pid in _list_victims(registry, run_id, victim, folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _list_victims(registry: Registry, run_id: str, victim: str, folder: Path) -> Iterator[int]:
    """Yields the process ids of a run that are of the victim's kind."""
    if victim == "supervisor":
        run = registry.run(run_id)
        if run.pid is not None and is_supervisor(run.pid, run.id):
            yield run.pid
        return
    for pid in list_live_ranks(folder):
        with suppress(psutil.Error):
            rank = psutil.Process(pid)
            if "torch.distributed.run" in rank.cmdline():
                continue
            if victim == "rank":
                yield pid
            else:
                children = rank.children()  # one tracks resources
                yield from (c.pid for c in children if "spawn_main" in " ".join(c.cmdline()))
