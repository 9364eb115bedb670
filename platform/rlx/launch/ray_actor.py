"""What actors of a run have in common that do its work beside the ranks, on any node."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import ray
from ray.exceptions import RayError

from rlx.home import REGISTRY, RunFolder
from rlx.launch.leftovers import open_temporary_folder
from rlx.launch.ray_folders import choose_working_folder
from rlx.text import escape_unprintable

__all__ = ["ActorOrder", "build_order", "end_actors", "enter_run", "require_actors"]

LOOK = 0.25
"""Seconds between two looks at what else the driver has to do."""
GRACE = 30.0
"""Seconds that actors have to end what they have started."""
SECRET = frozenset({REGISTRY, "RLX_REGISTRY", "RLX_WEB_TOKEN"})
"""Environment variables that may hold a secret, and that these actors do not need."""


class ActorOrder(TypedDict):
    """Where an actor works; Ray keeps it, to start the actor again."""

    folder: str
    cwd: str
    environment: dict[str, str]


def build_order(folder: RunFolder, environment: Mapping[str, str]) -> ActorOrder:
    """The order for actors of the run with this folder, which work where this process does.

    Args:
        environment: of the ranks.
    """
    return {
        "folder": str(folder.root),
        "cwd": str(Path.cwd()),
        "environment": {k: v for k, v in environment.items() if k not in SECRET},
    }


def enter_run(order: ActorOrder, ending: ExitStack) -> Path:
    """Makes this process, an actor's, work for a run; returns a folder for what it starts.

    Python's `tempfile` knows another one in this process, in which the folder is.

    Args:
        ending: removes the temporary folder when it is closed.
    """
    temporary = ending.enter_context(open_temporary_folder(RunFolder(Path(order["folder"]))))
    own = order["environment"] | temporary
    os.environ.update(own)
    os.chdir(choose_working_folder(order["cwd"], temporary["TMPDIR"]))
    # What a new interpreter would do; processes that it starts take over its path.
    sys.path[:0] = [place for place in own.get("PYTHONPATH", "").split(os.pathsep) if place]
    # They import the main module of this process, which is one of Ray's and imports Ray.
    vars(sys.modules["__main__"]).pop("__file__", None)
    # Ray starts its processes with this signal blocked, which they would pass on.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return Path(temporary["TMPDIR"])


def require_actors(kind: str, actors: Sequence[Any], check: Callable[[], None]) -> None:
    """Waits until all actors have started.

    Args:
        kind: what they are, in the singular.
        actors: with a method `find_host`.
        check: called while it waits; what it raises ends the wait.

    Raises:
        ConnectionError: one cannot start.
    """
    answers = [actor.find_host.remote() for actor in actors]
    waiting = list(answers)
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK)
        check()
    for number, answer in enumerate(answers):
        try:
            ray.get(answer)
        except RayError as error:
            why = escape_unprintable(str(error).strip().splitlines()[-1])
            raise ConnectionError(f"{kind} {number} cannot start: {why}") from error


def end_actors(actors: Sequence[Any]) -> None:
    """Has actors end what they have started, by their method `end`."""
    if actors:
        ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=GRACE)
