"""Environments with live sessions. A module of its own, so that worker processes can import it."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from rlx.plugin import Action, Reply, StatefulEnvironment


class World(StatefulEnvironment):
    """Adds a die in every turn, and writes every call to a file. A turn may say what goes wrong.

    A turn "NAME until FILE" does so until the file exists.
    """

    kinds: ClassVar[tuple[str, ...]] = ("say",)

    log: str = ""
    """The file of calls."""

    def open(self, problem: Any, seed: int) -> Any:
        self._note(f"open {problem['name']}")
        if problem["name"] == "locked":
            raise OSError("no such world")
        # Neither can be pickled, like a connection.
        return {"name": problem["name"], "sum": 0, "lock": threading.Lock()}

    def play(self, game: Any, action: Action) -> Reply:
        self._note(f"play {game['name']} {action.number} {action.text}")
        what, _, until = action.text.partition(" until ")
        if not (until and Path(until).exists()):
            if until:
                Path(until).touch()
            if what in _MISDEEDS:
                _MISDEEDS[what]()
        game["sum"] += random.randint(1, 6)
        return Reply(
            kind="say",
            observation=f"{game['name']} {game['sum']}",
            done=action.text == "end",
            info={"sum": game["sum"], "process": os.getpid()},
        )

    def close(self, game: Any) -> None:
        self._note(f"close {game['name']}")

    def _note(self, text: str) -> None:
        if self.log:
            with Path(self.log).open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")


class LiveWorld(World):
    """A world that cannot be replayed."""

    replayable: ClassVar[bool] = False


_MISDEEDS = {
    "raise": lambda: 1 / 0,
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(600),  # scenario
    "kill": lambda: os.kill(os.getpid(), 9),
}
