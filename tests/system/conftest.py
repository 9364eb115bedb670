"""Every test of this folder is `system`; and runs for them, made through the command line.

Starting a run costs far more than running one this small, so one that is followed to its end serves
many tests.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from guests import importable, write_distribution
from patience import LIMIT, find_processes, signal_processes, stop_process, wait_until
from run_homes import MIRRORED, RLCR, SMALL, ReadHome

from rlx.progress import read_progress

MAIN = "import sys; from rlx.cli import main; sys.exit(main())"
BRIEF = {**SMALL, "evaluation.problems": 4}
QUICK = RLCR.with_name("quick.yaml")
SHORT_QUICK = {
    "phases.0.steps": 1,
    "phases.1.steps": 2,
    "model.warm_start.steps": 10,
    "model.warm_start.warmup_steps": 2,
    "evaluation.problems": 4,
    "tracking.mlflow": "null",
    "runner.ranks": 2,
}
"""Of quick.yaml on two ranks."""
UNHURRIED = {"rewards.turn.unhurried": "{plugin: unhurried, turn: answer, seconds: 0.01}"}
"""Gives whoever watches a run some tenths of a second more per step, for no processor time."""
LONG = {
    **BRIEF,
    "phases.0.steps": 100_000,
    "rewards.turn.unhurried": "{plugin: unhurried, turn: answer, seconds: 0.02}",
}
"""Of a run that goes on until something ends it, and leaves the processor idle for most of it."""
GUEST = '''
import os
import time

from rlx.plugin import reward

@reward
def broken(sample):
    """Never works."""
    raise ValueError("the scorer is out of order")

@reward
def unhurried(sample, *, seconds: float):
    """Takes its time, for which the ranks wait."""
    time.sleep(seconds)
    return 0.0

@reward
def held(sample, *, lock: str):
    """Waits while a file is there."""
    while os.path.exists(lock):
        time.sleep(0.05)
    return 0.0
'''


class Home(ReadHome):
    """A home for runs, and the command line in it."""

    small, mirrored, brief, unhurried, long = SMALL, MIRRORED, BRIEF, UNHURRIED, LONG

    def __init__(self, folder):
        super().__init__(folder)
        self.yaml = folder / "rlcr.yaml"
        self.lock = folder / "lock"
        shutil.copy(RLCR, self.yaml)
        names = ("broken", "unhurried", "held")
        points = "".join(f"{name} = rlx_guest:{name}\n" for name in names)
        self.offer(f"[rlx.rewards]\n{points}", rlx_guest=GUEST)
        self.environment = {
            **os.environ,
            "RLX_HOME": str(self.path),
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "160",
        }
        self.add_path(folder / "guest")

    def add_path(self, *paths):
        """Has runs import from these folders, before all others."""
        known = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        every = [*map(str, paths), *filter(None, known)]
        self.environment["PYTHONPATH"] = os.pathsep.join(every)

    def add_plugins(self, name):
        """Offers the distribution `plugins/NAME` too."""
        self.add_path(*importable(name, self.folder / name))

    def offer(self, points, **modules):
        """Writes what the one distribution beside rlx offers, in place of what it offered."""
        write_distribution(self.folder / "guest", "rlx-guest", points, **modules)

    def begin(self, *arguments, sets=(), rehearse=False, program=MAIN):
        """Starts `rlx` in a process group of its own, as a terminal does.

        Rehearsals are left out, since each submission would pay for importing torch.
        """
        overrides = [f"--set={path}={value}" for path, value in dict(sets).items()]
        if arguments[0] == "submit" and not rehearse:
            overrides.append("--no-rehearsal")
        return subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments), *overrides],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def rlx(self, *arguments, sets=(), seconds=LIMIT, rehearse=False):
        return ended(self.begin(*arguments, sets=sets, rehearse=rehearse), seconds)

    def submit(self, *options, yaml=None, sets=()):
        """Submits an experiment; returns the id of its run."""
        done = self.rlx("submit", yaml or self.yaml, "-q", *options, sets=sets)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def until(self, condition, what):
        """Waits; slow machines are no failure."""
        return wait_until(what, condition)

    def processes(self):
        """Every process that was started for this home, whoever its parent is now."""
        return find_processes(self.path)

    def find(self, word, but=None):
        """Those of them with a word in their command lines, and without another one."""
        found = []
        for pid in self.processes():
            with suppress(psutil.Error):  # it has just ended
                command = "\0".join(psutil.Process(pid).cmdline())
                found += [pid] * (word in command and (but is None or but not in command))
        return found

    def ranks(self, run_id):
        """Processes that train a run."""
        return self.find(f"\0{self.run(run_id).directory}\0", but="torch.distributed.run")

    def freeze(self, *stopped):
        """Stops processes, at a moment at which none of them holds the registry's lock."""
        self.until(lambda: self.is_frozen(stopped), "a moment in which none of them writes")

    def is_frozen(self, stopped):
        signal_processes(stopped, signal.SIGSTOP)
        with (self.path / "registry.db.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                signal_processes(stopped, signal.SIGCONT)
                return False

    @property
    def held(self):
        """Of a run whose steps wait while `lock` is there."""
        return self.hold_turns("answer")

    def hold_turns(self, kind):
        """The same, for turns of another kind."""
        use = f"{{plugin: held, turn: '{kind}', lock: '{self.lock}', deadline: {LIMIT:g}}}"
        return {"rewards.turn.held": use}

    def hold(self):
        """Has every step of a `held` run wait that is not over yet."""
        self.lock.touch()

    def release(self):
        self.lock.unlink(missing_ok=True)

    def await_ranks(self, run_id):
        """Processes that train a run, as soon as its model is there; a search for them may take
        longer than many steps."""
        progress = Path(self.run(run_id).directory) / "progress.json"
        self.until(lambda: has_begun(progress), "its ranks to begin")
        ranks = self.ranks(run_id)
        assert ranks
        return ranks

    def list_differences_to_one_machine(self, launcher):
        """How two ranks of quick.yaml that a launcher starts differ from two of this machine."""
        spread = {**SHORT_QUICK, "runner.launcher": launcher}
        runs = [self.submit("--again", yaml=QUICK, sets=sets) for sets in (SHORT_QUICK, spread)]
        assert [self.run(run).step for run in runs] == [3, 3]
        return self.differences(*runs)

    def stop(self, run_id, after=0):
        """Has a run stopped after so many steps; were it not frozen, it could be done before it is
        asked."""
        ranks = self.await_ranks(run_id)
        self.until(lambda: self.run(run_id).step >= after, f"{after} steps")
        self.freeze(*ranks)
        assert self.rlx("stop", run_id).returncode == 0
        for rank in ranks:
            self.thaw(rank)
        self.until(lambda: self.run(run_id).ended, "it to end")
        assert self.run(run_id).status == "stopped", self.run(run_id).reason

    def thaw(self, rank):
        """Lets a process go on once its supervisor has asked it to end."""
        self.until(lambda: is_asked_to_end(rank), "its supervisor to pass that on")
        signal_processes([rank], signal.SIGCONT)

    def running(self):
        """Every process of this machine that has not ended."""
        found = psutil.process_iter(["status"])
        return [p.pid for p in found if p.info["status"] != psutil.STATUS_ZOMBIE]


def has_begun(progress):
    """Whether all ranks of a run are there, which they are once its model is."""
    shown = read_progress(progress)
    return shown is not None and shown.stage != "starting"


def is_asked_to_end(pid):
    """Whether a process that is frozen will find a SIGTERM, or has been killed meanwhile."""
    try:
        (line,) = re.findall(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(line, 16) >> (signal.SIGTERM - 1) & 1)


def ended(process, seconds=LIMIT):
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        stop_process(process)  # also closes its pipes, which a later test would be blamed for
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


SYSTEM = Path(__file__).parent
SECONDS = 1800
"""Of a test as a whole, which guards against a hang, no more."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if SYSTEM in item.path.parents:
            item.add_marker(pytest.mark.system)
            item.add_marker(pytest.mark.timeout(SECONDS))


def at_home(folder):
    home = Home(folder)
    yield home
    signal_processes(home.processes(), signal.SIGKILL)  # of a test that failed half-way


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    yield from at_home(tmp_path_factory.mktemp("submit"))


@pytest.fixture(scope="module")
def own_home(tmp_path_factory):
    """A home that no other module's runs are in."""
    yield from at_home(tmp_path_factory.mktemp("own"))


@pytest.fixture
def own(tmp_path):
    """A home of this test's own, in which nothing goes on at the end."""
    yield from at_home(tmp_path)


class Finished:
    """A run that was followed to its end, with what was printed."""

    def __init__(self, home, sets):
        self.home = home
        self.submitted = home.rlx("submit", home.yaml, sets=sets, rehearse=True)
        assert self.submitted.returncode == 0, self.submitted.stderr
        self.record = home.run("latest")
        self.id = self.record.id
        self.root = Path(self.record.directory)
        wait_until("the supervisor to finish the mirror", lambda: not home.processes())


@pytest.fixture(scope="session")
def finished(home):
    return Finished(home, MIRRORED)


@pytest.fixture(scope="module")
def own_finished(own_home):
    """A run to whose records a module adds."""
    return Finished(own_home, SMALL)
