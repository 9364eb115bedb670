"""Environments whose sessions wander; a module of its own, so that workers can import it."""

import os
import random
import threading
import time
from typing import Any, ClassVar

from rlx.plugin import Action, Reply, StatefulEnvironment


class Wandering(StatefulEnvironment):
    """Walks by a die and tells the whole way; a call takes up to 20 ms."""

    kinds: ClassVar[tuple[str, ...]] = ("say",)

    def open(self, problem: Any, seed: int) -> Any:
        return {"name": problem["name"], "way": [], "lock": threading.Lock()}

    def play(self, game: Any, action: Action) -> Reply:
        drawn = random.randint(1, 1000)
        time.sleep(drawn / 50_000)  # scenario
        game["way"].append(drawn)
        way = " ".join(map(str, game["way"]))
        return Reply(
            kind="say",
            observation=f"[{game['name']} {way}]",
            done=drawn > 950,
            info={"said": action.text, "way": list(game["way"]), "process": os.getpid()},
        )
