"""Environments with live sessions: what they keep between turns."""

import random
import threading
from typing import Any, ClassVar

from rows import each_row

from rlx.plugin import Action, Reply, StatefulEnvironment
from rlx.rollout import LocalHost
from rlx.testing import check_environment


class Rolls(StatefulEnvironment):
    """Adds a die in every turn, from Python's global generator, as many libraries do."""

    kinds: ClassVar[tuple[str, ...]] = ("roll",)
    pickles: bool = True
    """Whether the game can be pickled."""

    def open(self, problem: Any, seed: int) -> Any:
        return {"sum": random.randint(1, 6), "lock": None if self.pickles else threading.Lock()}

    def play(self, game: Any, action: Action) -> Reply:
        game["sum"] += random.randint(1, 6)
        return Reply(kind="roll", observation=f"{game['sum']}\n")


def play(environment, seed, turns):
    host = LocalHost(environment)
    (state,) = host.reset([({}, seed)])
    observations = []
    for number, text in enumerate(turns, 1):
        (step,) = host.step([(state, Action(text=text, number=number))])
        observations.append(step.observation)
        state = step.state
    return observations


def test_a_game_that_cannot_be_pickled_is_replayed_to_the_same_end():
    for seed in range(20):
        pickled = play(Rolls(), seed, "abcd")
        assert play(Rolls(pickles=False), seed, "abcd") == pickled
    assert len({tuple(play(Rolls(), seed, "abcd")) for seed in range(20)}) > 10


def test_games_leave_the_global_generator_alone_and_do_not_read_it():
    random.seed(5)
    before = random.getstate()
    first = play(Rolls(), 1, "ab")
    assert random.getstate() == before
    random.seed(6)
    assert play(Rolls(), 1, "ab") == first


@each_row("pickles", [True, False])
def test_the_adapter_keeps_the_promises_of_environments(pickles):
    check_environment(Rolls(pickles=pickles), problems=[{}])
