"""Environments with live sessions: what they keep between turns, and what a crash costs."""

import random
import threading
from typing import Any, ClassVar

from rows import each_row

from rlx.plugin import Action, Reply, StatefulEnvironment
from rlx.reward import RewardPool, SessionHost
from rlx.rollout import HostFault, LocalHost
from rlx.spec import EnvironmentLimits
from rlx.testing import check_environment


class Dice:
    """A game that draws from Python's global generator, as many libraries do."""

    def __init__(self) -> None:
        self.sum = random.randint(1, 6)


class Rolls(StatefulEnvironment):
    """Adds a die in every turn; the turn `crash` ends its process."""

    kinds: ClassVar[tuple[str, ...]] = ("roll",)
    pickles: bool = True
    """Whether the game can be pickled."""

    def open(self, problem: Any, seed: int) -> Any:
        dice = Dice()
        if not self.pickles:
            dice.lock = threading.Lock()  # type: ignore[attr-defined]
        return dice

    def play(self, game: Any, action: Action) -> Reply:
        if action.text == "crash":
            raise SystemExit(1)
        game.sum += random.randint(1, 6)
        return Reply(kind="roll", observation=f"{game.sum}\n", info={"sum": game.sum})


def play(environment, seed, turns, host=LocalHost):
    host = host(environment)
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


def test_a_call_that_ends_its_process_costs_itself_alone():
    expected = play(Rolls(), 0, "ab")
    with RewardPool(1, 2048) as pool:
        limits = EnvironmentLimits(600.0, 6000.0, None, 1, "fail")
        host = SessionHost(Rolls(), pool, limits)
        (state,) = host.reset([({}, 0)])
        (step,) = host.step([(state, Action(text="a"))])
        lost, kept = host.step(
            [(step.state, Action(text=turn, number=2)) for turn in ("crash", "b")]
        )
    assert isinstance(lost, HostFault)
    assert "SystemExit" in lost.reason
    assert [step.observation, kept.observation] == expected
