"""Homes whose runs are trained in this process, by the door through which a rank trains.

A `Home` answers what the command line answers: `home.rlx("submit", "x.yaml")` calls the command in
this process, records the run as it does, and trains it at once in place of a supervisor. A run of
four steps costs about two seconds, against ten of new processes. Nothing restarts, mirrors or kills
here: that is for tests/system.
"""

import contextlib
import fcntl
import io
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from run_homes import QUIET, RLCR, SMALL, ReadHome

from rlx.cli import main
from rlx.home import RunFolder
from rlx.launch.run_access import load_resolved_spec
from rlx.learner import Ranks
from rlx.record import Recorder
from rlx.run import run_experiment
from rlx.run.context import StopRequest
from rlx_registry import Registry, RunRecord

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}


class Home(ReadHome):
    """A home for runs, and the command line in it.

    Args:
        folder: where commands are called; the home is in it, and a copy of rlcr.yaml.
        paths: what is importable besides, such as another distribution.
    """

    small = SMALL

    def __init__(self, folder: Path, paths: Iterable[str] = ()) -> None:
        super().__init__(folder)
        self.paths = list(paths)
        self.yaml = folder / "rlcr.yaml"
        shutil.copy(RLCR, self.yaml)

    def rlx(
        self, *arguments: Any, sets: Mapping[str, Any] | None = None
    ) -> "CompletedProcess[str]":
        """Calls a command; what it prints, and its exit code."""
        command = [*map(str, arguments), *(f"--set={k}={v}" for k, v in (sets or {}).items())]
        if command[0] == "submit":
            command.append("--no-rehearsal")
        out, err = io.StringIO(), io.StringIO()
        with self._inside(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(command)
        return CompletedProcess(command, code, out.getvalue(), err.getvalue())

    def submit(self, spec: Path, sets: Mapping[str, Any] | None = None) -> RunRecord:
        """Runs an experiment to its end."""
        done = self.rlx("submit", spec, "--again", "--quiet", sets={**QUIET, **(sets or {})})
        assert done.returncode == 0, done.stderr
        return self.run(done.stdout.strip())

    def copy(self, folder: Path) -> "Home":
        """This home for a test that writes. Its files are links, but for those of the registry."""
        shutil.copytree(self.path, folder / "home", copy_function=os.link)
        for file in self.path.glob("registry.db*"):
            (folder / "home" / file.name).unlink()
            shutil.copy(file, folder / "home")
        return Home(folder, self.paths)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        environment = {
            "RLX_HOME": str(self.path),
            "PYTHONPATH": os.pathsep.join([*self.paths, os.environ.get("PYTHONPATH", "")]),
            "COLUMNS": "160",
            **ALONE,
        }
        with ExitStack() as inside:
            inside.enter_context(patch.dict(os.environ, environment))
            inside.enter_context(patch.object(sys, "path", [*self.paths, *sys.path]))
            inside.enter_context(contextlib.chdir(self.folder))
            inside.enter_context(patch("rlx.launch.lifecycle.start_supervisor", train_run))
            yield


class Finished:
    """A finished run of four steps, which tests read and none changes."""

    def __init__(self, home: Home, run_id: str) -> None:
        self.home, self.id = home, run_id
        self.record = home.run(run_id)
        assert self.record.status == "finished", self.record.reason
        self.root = Path(self.record.directory)
        (self.warm_start,) = (home.path / "cache" / "warm_start").iterdir()

    def bodies(self) -> Iterator[tuple[int, list[dict[str, Any]], Any]]:
        """Step, trees and index of every step."""
        return self.home.bodies(self.record)


def keep_finished_run(folder: Path) -> Finished:
    """The run of a folder that the workers of a session share: the first to ask trains it."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        home, name = Home(folder), folder / "run"
        if not name.exists():
            name.write_text(home.submit(home.yaml, SMALL).id)
        return Finished(home, name.read_text())


class Unstoppable(StopRequest):
    """Of a run that nobody stops: it leaves this process's signals alone."""

    def __init__(self) -> None:
        self._honoured = False
        self.requested = False


def train_run(run: RunRecord, registry_url: str) -> int:
    """Trains a run that has been recorded, and records how it ended; returns the process's id."""
    log = RunFolder(Path(run.directory)).log
    with (
        Registry.open(registry_url) as registry,
        log.open("a") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        _train_run(registry, run)
    return os.getpid()


def _train_run(registry: Registry, run: RunRecord) -> None:
    folder = RunFolder(Path(run.directory))
    spec = load_resolved_spec(folder)
    started = registry.start(run.id, {"submitted"})
    assert started is not None
    writer = registry.as_writer(run.id, started.attempt)
    recorder = Recorder(writer, run.id, keep_bodies=True, last=spec.steps)
    try:
        join_alone()
        run_experiment(spec, folder, Ranks(0, 1, torch.device("cpu")), recorder, Unstoppable())
        recorder.event("completed", "every phase and evaluation is recorded")
    except Exception as error:
        writer.transition(run.id, {"running"}, "failed", str(error))
        raise
    writer.transition(run.id, {"running"}, "finished")


def join_alone() -> None:
    """Makes a group of this process alone, in its memory: no port is taken. It stays, as DeepSpeed
    keeps what it has found."""
    if dist.is_initialized():
        return
    import deepspeed.comm.torch  # noqa: F401  (imported here: it takes seconds)

    # As in rlx.learner: else it is compiled. The package's own `torch` is that of PyTorch.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
