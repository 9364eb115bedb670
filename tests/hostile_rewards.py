"""Rewards that misbehave. A module of its own, so that worker processes can import it."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import ClassVar

from rlx.plugin import Environment, Reward, Sample, Score, Step, reward
from rlx.reward import workers
from rlx.reward.plugin_process import JobProcess


@reward
def length(sample):
    """Number of characters."""
    return float(len(sample.response))


@reward
def misbehave(sample, *, how: str):
    """Does what `how` says when the response is "bad"; 1 otherwise."""
    return {"bad": MISDEEDS[how]}.get(sample.response, lambda: 1.0)()


@reward
def modules(sample):
    """Whether the module named by the response has been imported into this process."""
    return float(sample.response in sys.modules)


@reward(scope="siblings")
def rank(samples):
    """Position in the group; one too few when a response is "short"."""
    short = any(sample.response == "short" for sample in samples)
    return [float(i) for i in range(len(samples) - short)]


@reward
def graded(sample, *, reason: str):
    """A score with all its parts."""
    return Score(0.5, reason, {"length": len(sample.response)})


@reward
def grow(sample):
    """Number of numbers in the problem, of which it adds one."""
    sample.problem["numbers"].append(0)
    return float(len(sample.problem["numbers"]))


class Grows(Environment):
    """A game whose state grows in place."""

    kinds: ClassVar[tuple[str, ...]] = ("say",)

    def reset(self, problem, seed):
        problem["numbers"].append(0)
        return list(problem["numbers"])

    def step(self, state, action) -> Step:
        state.append(0)
        return Step(kind="say", state=state, done=True, info={"length": len(state)})


@reward
def numpy_score(sample, *, make: str):
    """A score that NumPy makes."""
    import numpy

    return getattr(numpy, make)(1)


@reward(scope="siblings")
def numpy_scores(samples):
    """Positions in the group, as an array of NumPy."""
    import numpy

    return numpy.arange(len(samples))


@reward(scope="siblings")
def numpy_grid(samples):
    """An array of two dimensions, which is no list of verdicts."""
    import numpy

    return numpy.zeros((len(samples), 1))


@reward
def shout(sample):
    """1; it prints the response and half a line."""
    print(sample.response)
    sys.stderr.write("half")
    return 1.0


@reward
def nap(sample, *, seconds: float):
    """1, after a while."""
    time.sleep(seconds)  # scenario
    return 1.0


@reward
def dwell(sample):
    """Leaves a mark, and stays for an hour."""
    Path(sample.response).touch()
    time.sleep(3600)  # scenario


def _take_kill():
    """Whether a process is to be killed: the file that RLX_TEST_KILLS names says how many are."""
    kills = Path(os.environ["RLX_TEST_KILLS"])
    left = int(kills.read_text())
    kills.write_text(str(max(0, left - 1)))
    return left > 0


def keep_workers_killed(*given):
    """`keep_workers` of a keeper that may be killed when it starts."""
    if _take_kill():
        os.kill(os.getpid(), signal.SIGKILL)
    workers.keep_workers(*given)


def keep_workers_whose_children_are_killed(*given):
    """`keep_workers` of a keeper whose first children may be killed before they run a job."""
    begin = JobProcess.begin

    def begin_killed(self, chunk, deadlines, *, is_concurrent):
        if not deadlines and _take_kill():
            self._start()
            os.kill(self._pid, signal.SIGKILL)
            raise BrokenPipeError
        begin(self, chunk, deadlines, is_concurrent=is_concurrent)

    JobProcess.begin = begin_killed
    workers.keep_workers(*given)


@reward
def process(sample):
    """Id of the process it runs in."""
    return float(os.getpid())


class Abstains(Reward):
    """Has no opinion."""

    def score(self, sample: Sample) -> None:
        return None


class Unsendable(Abstains):
    """Raises when it is pickled."""

    def __getstate__(self):
        raise RuntimeError(HALF + LONG)


class Unreadable(Abstains):
    """Raises when it is unpickled."""

    def __setstate__(self, state):
        raise RuntimeError(HALF + LONG)


def fork():
    os.fork()  # both go on
    return 1.0


def spin():
    while True:
        pass


def leak():
    KEPT.append(bytearray(150 << 20))
    return 1.0


def noise():
    print("noise " * 10)
    os.write(1, b"more noise\n")
    sys.stderr.write("and more\n")
    return 1.0


def leave():
    sys.exit("done")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("nothing to say")


KEPT = []
HALF, LONG = "half \ud83d, NUL \0", "x" * 100_000


def fail(error):
    raise error


MISDEEDS = {
    "half_reason": lambda: Score(0.0, reason=HALF),
    "long_reason": lambda: Score(0.0, reason=LONG),
    "half_part": lambda: Score(0.0, parts={HALF: 1.0, LONG: 2.0}),
    "half_fault": lambda: fail(ValueError(HALF + LONG)),
    "fork": fork,
    "leak": leak,
    "spin": spin,
    "sleep": lambda: time.sleep(60),  # scenario
    "power": lambda: float(len(str(9**9**9))),
    "exit": lambda: os._exit(3),
    "sys_exit": leave,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hog": lambda: float(len(bytearray(4 << 30))),
    "nan": lambda: float("nan"),
    "infinite": lambda: Score(float("inf")),
    "text": lambda: "1.0",
    "complex": lambda: 1j,
    "reason": lambda: Score(1.0, reason=7),
    "parts": lambda: Score(1.0, parts={"x": float("nan")}),
    "noise": noise,
    "explode": lambda: fail(ValueError("no such target")),
    "explode_unprintably": lambda: fail(Unprintable()),
}
