"""What slow calls of an environment cost a step, in seconds of a clock that this program moves.

    python tests/benchmarks/waiting.py

64 dialogues of 10 turns. The world takes 1 s for a call and 10 s for a slow one: a tenth of all
calls, or all calls of a tenth of the dialogues. The model takes 0.2 s for a batch and 0.01 s for
each of its turns. "Lockstep" samples a turn of all dialogues when the slowest is there; "queues"
sample those that wait for the model, after a patience of 0.2 s. The ratio is beside what a step
cannot fall below: the waiting of the dialogue that waits longest, and the model's time without
any waiting.
"""

import heapq
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from speech import Characters, Hashing

from rlx.plugin import Environment, Problem, Step
from rlx.rollout import EnvironmentHost, LocalHost, RolloutTree, build_rollout_plan
from rlx.rollout.conversations import sample_conversations
from rlx.seeding import derive_seed
from rlx.spec import EnvironmentRolloutSpec
from rlx.stopwatch import Clock

PROBLEMS, COUNT, TURNS = 8, 8, 10
USUAL, SLOW = 1.0, 10.0
PER_BATCH, PER_TURN = 0.2, 0.01
PATIENCE = 0.2

Slow = Literal["calls", "dialogues", "none"]


class Echo(Environment):
    """Repeats what it was told."""

    kinds: ClassVar[tuple[str, ...]] = ("say",)

    def reset(self, problem: Any, seed: int) -> Any:
        return ()

    def step(self, state: Any, action: Any) -> Step:
        said = (*state, action.text)
        return Step(kind="say", state=said, observation=f"[{len(said)} {action.text}]")


class World(EnvironmentHost):
    """A host whose calls take their time.

    Args:
        slow: which calls are slow; "none": none takes any time.
        patience: as of `rlx.rollout.EnvironmentHost`.
    """

    def __init__(self, slow: Slow, patience: float | None) -> None:
        self.slow, self.patience = slow, patience
        self.host, self.time = LocalHost(Echo()), 0.0
        self.waited: dict[int, float] = defaultdict(float)
        self._running: list[tuple[float, int, Any]] = []
        self._calls: dict[int, int] = defaultdict(int)

    def submit(self, number: int, what: Literal["reset", "step"], arguments: Any) -> None:
        (answer,) = getattr(self.host, what)([arguments])
        took = 0.0
        if self.slow != "none" and what == "step":
            self._calls[number] += 1
            drawn = (number,) if self.slow == "dialogues" else (number, self._calls[number])
            took = SLOW if derive_seed(1, self.slow, *drawn) % 10 == 0 else USUAL
        self.waited[number] += took
        heapq.heappush(self._running, (self.time + took, number, answer))

    def collect(self, seconds: float | None) -> list[tuple[int, Any]]:
        first = self._running[0][0] if self._running else float("inf")
        end = first if seconds is None else min(first, self.time + seconds)
        self.time = max(self.time, end)
        over = []
        while self._running and self._running[0][0] <= self.time:
            over.append(heapq.heappop(self._running)[1:])
        return over

    def reset(self, calls: Any) -> list[Any]:
        return self.host.reset(calls)

    def step(self, calls: Any) -> list[Any]:
        return self.host.step(calls)

    def release(self, states: Any) -> None:
        self.host.release(states)


class Model(Hashing):
    """A sampler that takes its time."""

    def __init__(self, world: World) -> None:
        super().__init__(("right", "wrong", "perhaps"))
        self.world = world

    def generate(self, requests: Any, sampling: Any) -> Any:
        self.world.time += PER_BATCH + PER_TURN * sum(len(r.seeds) for r in requests)
        return super().generate(requests, sampling)


class Waiting(NamedTuple):
    """What a step took: seconds in all, batches of the model, seconds that the dialogue which waits
    longest waits for the world, and what was sampled."""

    seconds: float
    batches: int
    longest: float
    trees: list[RolloutTree]


def measure_waiting(slow: Slow, patience: float | None) -> Waiting:
    """Samples a step; the numbers are the same on every machine."""
    environment = {"plugin": "echo", "on_error": "fail"}
    settings = {"environment": environment, "num_generations": COUNT, "max_turns": TURNS}
    plan = build_rollout_plan(EnvironmentRolloutSpec.model_validate(settings))
    assert plan.talk is not None
    problems = [Problem(id=f"{n}", prompt=f"{n}?", fields={}) for n in range(PROBLEMS)]
    world = World(slow, patience)
    model = Model(world)
    trees = sample_conversations(
        *(plan.talk, problems, range(PROBLEMS), model, Characters(), world),
        Clock(now=lambda: world.time),
    )
    return Waiting(world.time, len(model.calls), max(world.waited.values()), trees)


def main() -> None:
    """Prints a table."""
    model = measure_waiting("none", None).seconds
    print(f"{'slow tenth of':14} {'':8} {'seconds':>8} {'batches':>8} {'ratio':>6}")
    for slow in ("calls", "dialogues"):
        for name, patience in (("lockstep", None), ("queues", PATIENCE)):
            took = measure_waiting(slow, patience)
            ratio = took.seconds / (took.longest + model)
            print(f"{slow:14} {name:8} {took.seconds:8.1f} {took.batches:8} {ratio:6.2f}")


if __name__ == "__main__":
    main()
