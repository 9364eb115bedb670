"""What users wait for: commands, and a run before it trains or after the kill of a rank."""

import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from harness import Spent, beside, in_turns, row

from rlx.descendants import adopt_orphans, kill_descendants
from rlx.home import RunFolder
from rlx.launch import list_live_ranks
from rlx.progress import read_progress

ROOT = Path(__file__).parents[2]
ROUNDS = 3
LOOK = 0.05
IMPORTS = "import torch, transformers, deepspeed"
VERBS = {
    "validate": "validate experiments/rlcr.yaml",
    "runs": "runs",
    "status": "status latest",
    "samples": "samples latest",
    "samples, a row": "samples latest --credit --row 0",
    "plan": "plan experiments/quick.yaml",
    "export": "export latest {own}/model",
    "rm": "rm latest --yes",
}
"""What is measured of the command line, by name."""


def verb_cpu_ratios() -> list[dict]:
    """CPU time of whole commands, start of Python included, as ratios to a Python that imports what
    each of them needs. Each has a copy of the home of a finished run of `experiments/quick.yaml`.
    """
    rlx = Path(sys.executable).with_name("rlx")
    with TemporaryDirectory() as folder:
        home, own = Path(folder, "home"), Path(folder, "own")
        _run([rlx, "submit", "experiments/quick.yaml"], home)

        def start(command: Sequence[Path | str]) -> Spent:
            shutil.rmtree(own, ignore_errors=True)
            shutil.copytree(home, own)
            return _run(command, own)

        sides = {
            name: partial(start, [rlx, *arguments.format(own=own).split()])
            for name, arguments in VERBS.items()
        }
        python = [sys.executable, "-c", "import pydantic, yaml, click; pydantic.BaseModel"]
        took = in_turns({"python": lambda: _run(python), **sides}, 5)
    baseline = "a Python that imports Pydantic, PyYAML and click"
    theirs = took.pop("python")
    return [
        row(
            f"verb_cpu_ratios {name}",
            [ours.cpu / their.cpu for ours, their in zip(spent, theirs, strict=True)],
            beside(baseline, [t.cpu for t in theirs]),
            "times its CPU time",
            milliseconds=1e3 * statistics.median(t.cpu for t in spent),
        )
        for name, spent in took.items()
    ]


def start_cpu_seconds() -> list[dict]:
    """CPU seconds of all processes of a run whose warm start is stored: with one rank and with two
    from `rlx submit` to the first step, and from the kill of a rank to its successor's next."""
    adopt_orphans()
    with TemporaryDirectory() as home:
        sides = {
            "": lambda: _start(Path(home), 1),
            "2 ranks": lambda: _start(Path(home), 2),
            "killed rank": lambda: _restart(Path(home)),
            "imports": lambda: _run([sys.executable, "-c", IMPORTS]),
        }
        took = in_turns(sides, ROUNDS)
    baseline = beside(f"`{IMPORTS}`", [t.cpu for t in took.pop("imports")])
    return [
        row(
            f"start_cpu_seconds {name}".strip(),
            [t.cpu for t in spent],
            baseline,
            "CPU s",
            wall=sorted(t.wall for t in spent)[ROUNDS // 2],
        )
        for name, spent in took.items()
    ]


def sum_tree_seconds() -> float:
    """CPU seconds of all processes below this one so far, of those that have ended too."""
    me = psutil.Process()
    own = me.cpu_times()
    seconds = own.children_user + own.children_system
    for process in me.children(recursive=True):
        with suppress(psutil.Error):
            seconds += sum(process.cpu_times()[:4])
    return float(seconds)


def _run(command: Sequence[Path | str], home: Path | None = None) -> Spent:
    env = os.environ if home is None else os.environ | {"RLX_HOME": str(home)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


def _start(home: Path, ranks: int) -> Spent:
    before, began = sum_tree_seconds(), time.perf_counter()
    _submit(home, ranks)
    _await_step(home)
    spent = Spent(sum_tree_seconds() - before, time.perf_counter() - began)
    kill_descendants()
    return spent


def _restart(home: Path) -> Spent:
    """Kills the only rank after its first step."""
    _submit(home, 1, "--set=tracking.mlflow=null")
    folder = _await_step(home)
    before, began = sum_tree_seconds(), time.perf_counter()
    for rank in list_live_ranks(folder.root):
        os.kill(rank, signal.SIGKILL)
    while _is_training(folder):  # until the next rank says that it starts
        time.sleep(LOOK)
    _await_step(home)
    spent = Spent(sum_tree_seconds() - before, time.perf_counter() - began)
    kill_descendants()
    return spent


def _submit(home: Path, ranks: int, *sets: str) -> None:
    command = [Path(sys.executable).with_name("rlx"), "submit", "experiments/quick.yaml", "--again"]
    subprocess.run(
        [*command, "--detach", f"--set=runner.ranks={ranks}", *sets],
        cwd=ROOT,
        env={**os.environ, "RLX_HOME": str(home)},
        check=True,
        capture_output=True,
    )


def _await_step(home: Path) -> RunFolder:
    """Waits for the newest run to train; returns its folder."""
    folder = RunFolder(max((home / "runs").glob("r-*"), key=lambda path: path.stat().st_ctime))
    while not _is_training(folder):
        time.sleep(LOOK)
    return folder


def _is_training(folder: RunFolder) -> bool:
    progress = read_progress(folder.progress)
    return progress is not None and progress.stage.startswith("training") and progress.done > 0
