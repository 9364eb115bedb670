"""Searches for texts that a reward pays without being solutions.

Two searches maximise the reward: mutation of texts, and a small policy over pieces of text trained
by REINFORCE. Both know what the examples and their problem show. What counts as a solution is
decided by the reward's own `is_solution`. Without it, a text counts for the least that it earns
over the example problems and over *decoys*, copies with other numbers and words: nobody can solve
a problem that the text was not made for, so what is paid everywhere is paid for nothing.

Rewards run as in training, in killable workers. All draws derive from one seed. Calls are bounded
in number, and a slow reward also by time.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.plugin import Sample
from rlx.reward import JobOutcome, RewardJob
from rlx.seeding import derive_seed
from rlx.testing.decoys import (
    DEADLINE,
    get_example_values,
    list_decoys,
    list_example_texts,
    list_sample_groups,
    place_text,
    select_examples,
)
from rlx.testing.mutation import list_pieces, list_seed_texts, mutate_text
from rlx.testing.processes import score_jobs

__all__ = ["AdversarialReport", "Find", "search_adversarial_texts"]

_POPULATION = 24
_GENERATION = 48
_ROUND = 48
_LENGTH = 12
_MOST_FINDS = 64
_LEARNING_RATE = 12.0
_SHARE_OF_POLICY = 0.4
"""Share of the calls that the trained policy may make."""


@dataclass(frozen=True, slots=True)
class Find:
    """A text that is paid without being a solution.

    Attributes:
        score: what it earns; without `is_solution`, the least over all problems.
        origin: how it was found: "given", the name of a mutation, or "policy".
        sample: the sample that it was scored in.
    """

    text: str
    score: float
    origin: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class AdversarialReport:
    """What a search found.

    Attributes:
        calls: number of calls of the reward.
        full: what a solution earns: the best value of the examples.
        judged: whether the reward says what a solution is.
        problems: number of problems on which a text was scored.
        reads_problem: whether any text earned different values for different problems.
        finds: the texts that earn more than the least, the best and then the shortest first.
        closest: the best text of every origin, paid or not.
        faults: texts with which the reward failed, and how.
        outside: texts with a score outside `value_range`.
    """

    calls: int
    full: float
    judged: bool
    problems: int
    reads_problem: bool
    finds: tuple[Find, ...]
    closest: tuple[Find, ...]
    faults: tuple[tuple[str, str], ...] = ()
    outside: tuple[Find, ...] = ()

    @property
    def paid_in_full(self) -> Find | None:
        """The find that earns as much as a solution, if there is one."""
        if not self.finds or self.finds[0].score < self.full:
            return None
        return self.finds[0]


class _SolutionJudge:
    """Asks a reward, in a worker, whether a sample is a solution. As picklable as the reward."""

    scope = "sample"

    def __init__(self, reward: Any) -> None:
        self.reward = reward

    def score(self, sample: Sample) -> float | None:
        """1 for a solution, 0 for none, None if the reward cannot tell."""
        solved = self.reward.is_solution(sample)
        return None if solved is None else float(solved)


@dataclass(frozen=True, slots=True)
class _Judged:
    text: str
    origin: str
    fitness: float
    sample: Sample


@dataclass(eq=False)
class _Arena:
    """Scores texts on every problem, and remembers the best.

    Attributes:
        groups: one call's samples per problem; the text replaces the first sample's response.
    """

    reward: Any
    groups: list[tuple[Sample, ...]]
    judged: bool
    budget: int
    until: float
    full: float
    enough: int = 1
    calls: int = 0
    reads_problem: bool = False
    best: dict[str, _Judged] = field(default_factory=dict)
    faults: dict[str, tuple[str, str]] = field(default_factory=dict)
    outside: list[Find] = field(default_factory=list)

    def judge_texts(self, texts: Sequence[tuple[str, str]]) -> list[_Judged]:
        """Scores texts, given with their origins."""
        room = max(0, (self.budget - self.calls) // len(self.groups))
        texts = texts[:room]
        trials = [[place_text(group, text) for group in self.groups] for text, _ in texts]
        jobs = [self._job(self.reward, samples) for trial in trials for samples in trial]
        outcomes = score_jobs(jobs)
        self.calls += len(jobs)
        solved = self._judge_solutions([samples for trial in trials for samples in trial])
        found = []
        width = len(self.groups)
        for number, ((text, origin), trial) in enumerate(zip(texts, trials, strict=True)):
            span = slice(number * width, (number + 1) * width)
            found.append(self._judge_text(text, origin, trial, outcomes[span], solved[span]))
        for one in found:
            if one.text not in self.best or self.best[one.text].fitness < one.fitness:
                self.best[one.text] = one
        return found

    def _job(self, reward: Any, samples: tuple[Sample, ...]) -> RewardJob:
        return RewardJob(reward, samples, DEADLINE)

    def _judge_solutions(self, trials: Sequence[tuple[Sample, ...]]) -> list[bool]:
        """Whether each first sample is a solution; all are none if the reward does not say."""
        if not self.judged:
            return [False] * len(trials)
        judge = _SolutionJudge(self.reward)
        outcomes = score_jobs([self._job(judge, samples[:1]) for samples in trials])
        for samples, outcome in zip(trials, outcomes, strict=True):
            if outcome.fault is not None:
                self._note_fault(samples[0].response, f"is_solution: {outcome.fault}")
        return [_get_first_value(outcome) != 0.0 for outcome in outcomes]

    def _judge_text(
        self,
        text: str,
        origin: str,
        trial: Sequence[tuple[Sample, ...]],
        outcomes: Sequence[JobOutcome],
        solved: Sequence[bool],
    ) -> _Judged:
        values = []
        for samples, outcome in zip(trial, outcomes, strict=True):
            if outcome.fault is not None:
                self._note_fault(text, outcome.fault)
            value = _get_first_value(outcome)
            values.append(-math.inf if value is None else value)
            self._check_range(text, origin, values[-1], samples[0])
        self.reads_problem |= len(set(values)) > 1
        if self.judged:
            own = [-math.inf if s else v for v, s in zip(values, solved, strict=True)]
            place = max(range(len(own)), key=own.__getitem__)
        else:
            own, place = values, min(range(len(values)), key=values.__getitem__)
        return _Judged(text, origin, own[place], trial[place][0])

    def _note_fault(self, text: str, fault: str) -> None:
        self.faults.setdefault(fault, (text, fault))

    def _check_range(self, text: str, origin: str, value: float, sample: Sample) -> None:
        promised = self.reward.value_range() if hasattr(self.reward, "value_range") else None
        if promised is not None and value > -math.inf:
            low, high = promised
            if not low <= value <= high:
                self.outside.append(Find(text, value, origin, sample))

    def is_done(self) -> bool:
        """Whether no call or time is left, or enough texts earn as much as a solution."""
        if self.calls + len(self.groups) > self.budget or time.monotonic() > self.until:
            return True
        return sum(one.fitness >= self.full for one in self.best.values()) >= self.enough


def search_adversarial_texts(
    reward: Any, *, budget: int = 1200, seconds: float = 20.0, enough: int = 1, seed: int = 0
) -> AdversarialReport | None:
    """Searches for texts that are paid without being solutions.

    Args:
        reward: an instance; its examples supply problems, tags and the value of a solution.
        budget: greatest number of calls of the reward.
        seconds: no further texts are drawn after this time.
        enough: number of texts paid like a solution that end the search.
        seed: seeds all draws.

    Returns:
        None if nothing can be said: the reward has no examples, or it does not say what a solution
        is and there is only one problem.
    """
    examples = select_examples(reward)
    if not examples:
        return None
    groups = list_sample_groups(examples)
    judged = reward.scope == "sample" and _is_judge(reward, groups[0][0])
    rng = random.Random(derive_seed(seed, "adversary", type(reward).__name__))
    groups += list_decoys(reward, groups, rng)
    if not judged and len(groups) < 2 and groups[0][0].problem:
        return None  # its own solution could not be told from a text that is paid everywhere
    full = max(v for e in examples for v in get_example_values(e) if v is not None)
    arena = _Arena(reward, groups, judged, budget, time.monotonic() + seconds, full, enough)
    responses = [text for e in examples for text in list_example_texts(e)]
    problem = groups[0][0].problem
    until = int(budget * (1 - _SHARE_OF_POLICY))
    _search_by_mutation(arena, list_seed_texts(responses, problem), responses, rng, until)
    _search_by_policy(arena, list_pieces(responses, problem), rng)
    ranked = _rank_texts(arena)
    return AdversarialReport(
        calls=arena.calls,
        full=full,
        judged=judged,
        problems=len(groups),
        reads_problem=arena.reads_problem,
        finds=_select_finds(ranked),
        closest=_select_closest(ranked),
        faults=tuple(arena.faults.values()),
        outside=tuple(arena.outside),
    )


def _is_judge(reward: Any, sample: Sample) -> bool:
    """Whether a reward says what a solution is."""
    return hasattr(reward, "is_solution") and reward.is_solution(sample) is not None


def _get_first_value(outcome: JobOutcome) -> float | None:
    if outcome.fault is not None or not outcome.verdicts or outcome.verdicts[0] is None:
        return None
    return outcome.verdicts[0].value


# Searches -----------------------------------------------------------------------------------------


def _search_by_mutation(
    arena: _Arena, seeds: Sequence[str], responses: Sequence[str], rng: random.Random, until: int
) -> None:
    """Climbs from the seed texts: keeps the best of every generation and changes them."""
    arena.judge_texts([(text, "given") for text in seeds[: until // (2 * len(arena.groups))]])
    pieces = list_pieces(responses, arena.groups[0][0].problem)
    while arena.calls < until and not arena.is_done():
        ranked = sorted(arena.best.values(), key=lambda one: (-one.fitness, len(one.text)))
        parents = [one.text for one in ranked[:_POPULATION]]
        parents += rng.sample(list(arena.best), min(_POPULATION // 3, len(arena.best)))
        parents += [text for text in responses if len(text) < 2000]
        drawn = [mutate_text(rng.choice(parents), parents, pieces, rng) for _ in range(_GENERATION)]
        arena.judge_texts([one for one in dict(drawn).items() if one[0] not in arena.best])


def _search_by_policy(arena: _Arena, pieces: Sequence[str], rng: random.Random) -> None:
    """Trains a policy over pieces on what its texts earn."""
    import numpy as np

    from rlx.testing.piece_policy import PiecePolicy, compute_policy_gradient

    ends = len(pieces)
    policy = PiecePolicy.build_uniform(ends + 1, _LENGTH)
    draws = np.random.default_rng(rng.getrandbits(64))
    while not arena.is_done():
        choices = policy.sample_choices(_ROUND, draws)
        texts = ["".join(_read_pieces(row, pieces)) for row in choices.tolist()]
        found = arena.judge_texts([(text, "policy") for text in texts])
        choices = choices[: len(found)]
        earned = np.array([max(one.fitness, -1.0) for one in found])
        gradient = compute_policy_gradient(
            policy.compute_probabilities(choices), choices, earned, ends
        )
        policy = policy.apply_gradient(choices, gradient, _LEARNING_RATE)


def _read_pieces(choices: Sequence[int], pieces: Sequence[str]) -> Iterator[str]:
    for choice in choices:
        if choice == len(pieces):
            return
        yield pieces[choice]


def _rank_texts(arena: _Arena) -> list[Find]:
    """All texts with a value, the best and then the shortest first."""
    finite = [one for one in arena.best.values() if one.fitness > -math.inf]
    finite.sort(key=lambda one: (-one.fitness, len(one.text), one.text))
    return [Find(one.text, one.fitness, one.origin, one.sample) for one in finite]


def _select_finds(ranked: Sequence[Find]) -> tuple[Find, ...]:
    least = ranked[-1].score if ranked else 0.0
    return tuple(find for find in ranked if find.score > least)[:_MOST_FINDS]


def _select_closest(ranked: Sequence[Find]) -> tuple[Find, ...]:
    best: dict[str, Find] = {}
    for find in ranked:
        best.setdefault(find.origin, find)
    return tuple(best.values())
