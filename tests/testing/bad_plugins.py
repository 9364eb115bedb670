"""Plugins that break one promise each. A module of its own: other processes import it."""

import itertools
import random
import statistics
from dataclasses import replace
from typing import ClassVar

from rlx.plugin import (
    Demonstration,
    Environment,
    Episode,
    Estimator,
    Example,
    Mask,
    Plugin,
    Problem,
    Reward,
    Sample,
    Step,
    reward,
)

CALLS = itertools.count()


def said(text, id="0"):
    return Sample(id=id, problem={"words": []}, turn="answer", number=1, response=text)


@reward
def fine(sample, *, limit: int = 3):
    """1 when short."""
    return float(len(sample.response) < limit)


@reward
def nameless(sample):
    return 1.0


@reward
def half_an_option(sample, *, limit: int = 1.5):
    """Its default is of another type."""
    return 1.0


@reward(examples=[Example(name="gold", sample=said("yes"), value=1.0)])
def breaks_its_word(sample):
    """Is worth less than its author says."""
    return 0.5


@reward
def by_count(sample):
    """Counts its calls."""
    return float(next(CALLS))


@reward
def by_hash(sample):
    """Is the same within a process alone."""
    return float(hash(sample.response) % 1000)


@reward(examples=[Example(name="gold", sample=said("7"), value=7.0)])
def trusting(sample):
    """Takes every response for a number."""
    return float(sample.response)


class beyond_its_range(Reward):
    """Pays more than it promises for a text that no example shows."""

    def value_range(self):
        return 0.0, 1.0

    def score(self, sample):
        return 2.0 if "nan" in sample.response else 1.0


@reward(scope="group")
def by_position(samples):
    """Favours whoever comes first."""
    return [float(i) for i in range(len(samples))]


@reward(scope="siblings")
def spread(samples):
    """Needs two for a deviation."""
    deviation = statistics.stdev(len(sample.response) for sample in samples)
    return [deviation for _ in samples]


def local():
    class Hidden(Reward):
        """Cannot be found by its name."""

        def score(self, sample):
            return 1.0

    return Hidden


class Sums(Plugin):
    """Keeps every promise of a task."""

    demonstrates: ClassVar[bool] = True

    def problem(self, split, index, seed):
        number = 2 * index + (split == "test")
        return Problem(id=str(number), prompt=f"{number}+0=", fields={"answer": number})

    def demonstration(self, problem, seed):
        return Demonstration((problem.prompt,))


class Secretive(Sums):
    """Has no demonstrations, and does not say so."""

    def demonstration(self, problem, seed):
        raise NotImplementedError


class Mute(Secretive):
    """Has no demonstrations, and says so."""

    demonstrates: ClassVar[bool] = False


class Fickle(Sums):
    """Draws its problems from nowhere."""

    def problem(self, split, index, seed):
        number = random.randrange(10**9) * 2 + (split == "test")
        return Problem(id=str(number), prompt=f"{number}", fields={})


class Leaky(Sums):
    """Tests what it trains."""

    def problem(self, split, index, seed):
        return Problem(id=str(index), prompt=f"{index}+0=", fields={})


class Odd(Sums):
    """Has a tuple in its fields."""

    def problem(self, split, index, seed):
        number = 2 * index + (split == "test")
        return Problem(id=str(number), prompt=f"{number}", fields={"numbers": (1, 2)})


class Critical(Estimator):
    """Needs an environment."""

    needs = frozenset({"environment"})
    implementation = "nowhere:at_all"


class Nowhere(Mask):
    """Names an implementation that is not there."""

    implementation = "nowhere:at_all"


class Echo(Environment):
    """Ends with the turn that the problem names."""

    kinds: ClassVar[tuple[str, ...]] = ("say",)
    examples: ClassVar[tuple[Episode, ...]] = (
        Episode(
            name="gold",
            problem={"word": "stop"},
            turns=("go", "go", "stop"),
            kinds=("say", "say", "say"),
            observations=("1", "2", "3"),
        ),
        Episode(name="poor", problem={"word": "stop"}, turns=("go",), kinds=("say",), done=False),
    )

    def reset(self, problem, seed):
        return {"word": problem["word"], "turns": 0}

    def step(self, state, action):
        turns = state["turns"] + 1
        return Step(
            kind="say",
            state={**state, "turns": turns},
            observation=str(turns),
            done=action.text == state["word"],
        )


class Unfinished(Environment):
    """Begins, and never answers."""

    kinds: ClassVar[tuple[str, ...]] = ("say",)

    def reset(self, problem, seed):
        return {}


class Boastful(Echo):
    """Does not do what its examples say."""

    def step(self, state, action):
        step = super().step(state, action)
        return Step(kind="say", state=step.state, observation=step.observation)


class Careless(Echo):
    """Counts in the state that it is given."""

    def step(self, state, action):
        state["turns"] += 1
        step = super().step({**state, "turns": state["turns"] - 1}, action)
        return Step(kind="say", state=state, observation=step.observation, done=step.done)


class Bare(Echo):
    """Reads of its problem, and has no example."""

    examples: ClassVar[tuple[Episode, ...]] = ()


class Kept(Bare):
    """Counts all calls that there ever were."""

    def reset(self, problem, seed):
        return None

    def step(self, state, action):
        return Step(kind="say", observation=f"{next(CALLS)}")


class Trusting(Echo):
    """Believes that every turn says something."""

    def step(self, state, action):
        return super().step({**state, "first": action.text[0]}, action)


class InTurn(Echo):
    """Two players speak in turn."""

    self_play: ClassVar[bool] = True
    examples: ClassVar[tuple[Episode, ...]] = (
        *Echo.examples,
        replace(Echo.examples[0], name="both", self_play=True),
    )

    def step(self, state, action):
        given = super().step(state, action)
        return replace(given, player=0 if action.player is None else 1 - action.player)


class Selfish(InTurn):
    """Player 0 goes on and on."""

    def step(self, state, action):
        return replace(super().step(state, action), player=0)


class Whispering(InTurn):
    """Tells player 1 nothing."""

    examples: ClassVar[tuple[Episode, ...]] = (
        *Echo.examples,
        replace(InTurn.examples[-1], observations=()),
    )

    def step(self, state, action):
        given = super().step(state, action)
        return replace(given, observation="") if given.player else given
