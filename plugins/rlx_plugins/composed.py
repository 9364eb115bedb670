"""Plugins composed of other plugins: a mixture of tasks, and a reward per data source."""

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from rlx.plugin import Demonstration, Example, Plugin, Problem, Reward, Sample, Split, Use
from rlx_plugins.examples import build_example

_SOURCES = {
    "qa": {"plugin": "exact_match"},
    "sums": {"plugin": "exact_match", "field": "sum"},
}


def _build_source_example(name: str, source: str, answer: str, value: float) -> Example:
    return build_example(
        name,
        value,
        options={"sources": _SOURCES},
        problem={"data_source": source, "answer": "Paris", "sum": 7},
        spans={"answer": answer},
    )


class ByDataSource(Reward):
    """Scores each turn with the reward of its problem's `data_source` (as TinyZero and verl do).

    `sources: {countdown: {plugin: countdown.verify}, gsm8k: {plugin: math_verify}}`. A problem
    whose source has no reward raises, because that is an error in the data.
    """

    nested: ClassVar[Mapping[str, str]] = {"sources": "reward"}
    examples: ClassVar[tuple[Example, ...]] = (
        _build_source_example("gold", "qa", "Paris", 1.0),
        _build_source_example("gold of another source", "sums", "7", 1.0),
        _build_source_example("right only elsewhere", "sums", "Paris", 0.0),
    )

    sources: Mapping[str, Use] = Field(min_length=1)
    """The reward of every source; all must have the scope `sample`."""

    @property
    def reads_parent(self) -> bool:  # type: ignore[override]
        return any(getattr(r, "reads_parent", False) for r in self.inner("sources").values())

    @property
    def concurrency(self) -> int:  # type: ignore[override]
        return max(getattr(r, "concurrency", 1) for r in self.inner("sources").values())

    def check(self) -> None:
        for source, reward in self.inner("sources").items():
            if reward.scope != "sample":
                raise ValueError(
                    f"by_data_source scores one sample at a time, but the reward of {source!r} "
                    f"looks at {reward.scope}"
                )
        super().check()

    def score(self, sample: Sample) -> Any:
        source = sample.problem.get("data_source")
        rewards = self.inner("sources")
        if not isinstance(source, str) or source not in rewards:
            raise ValueError(f"data_source is {source!r}; there are rewards for {sorted(rewards)}")
        return rewards[source].score(sample)


class Mixture(Plugin):
    """Samples problems of several tasks by weight; each problem keeps its task's fields.

    `tasks: {easy: {plugin: countdown, numbers: [2]}, hard: {plugin: countdown, numbers: [4]}}`.
    `data_source` is set by the problem's task, and by default is the task's key here.
    """

    nested: ClassVar[Mapping[str, str]] = {"tasks": "task"}

    tasks: Mapping[str, Use] = Field(min_length=1)
    weights: Mapping[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None
    """Relative frequency of every task, in each split; uniform by default."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any("/" in name for name in self.tasks):
            raise ValueError("tasks must have names without a '/'")
        if self.weights is None:
            return self
        if set(self.weights) != set(self.tasks):
            raise ValueError(f"weights must name exactly {', '.join(sorted(self.tasks))}")
        if not sum(self.weights.values()):
            raise ValueError("weights must not all be zero")
        return self

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        weights = self.weights or dict.fromkeys(self.tasks, 1.0)
        # In the order of the names: that of the YAML is no part of an experiment's digest.
        places = _sample_task_positions(
            tuple(sorted(weights.items())), split, seed, index // _BLOCK + 1
        )
        name, position = places[index]
        problem: Problem = self.inner("tasks")[name].problem(split, position, seed)
        return replace(
            problem,
            id=f"{name}/{problem.id}",
            fields={"data_source": name, **problem.fields},
            stratum=f"{name}: {problem.stratum}" if problem.stratum else name,
        )

    @property
    def demonstrates(self) -> bool:
        return all(getattr(task, "demonstrates", True) for task in self.inner("tasks").values())

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        name, _, own_id = problem.id.partition("/")
        own = replace(
            problem,
            id=own_id,
            stratum="" if problem.stratum == name else problem.stratum.removeprefix(f"{name}: "),
        )
        given: Demonstration = self.inner("tasks")[name].demonstration(own, seed)
        return given


_BLOCK = 1024


@lru_cache(maxsize=8)
def _sample_task_positions(
    weights: tuple[tuple[str, float], ...], split: Split, seed: int, blocks: int
) -> tuple[tuple[str, int], ...]:
    """The tasks and positions of the first blocks; more blocks only append."""
    rng = random.Random(f"mixture/{seed}/{split}")
    names, values = zip(*weights, strict=True)
    taken = dict.fromkeys(names, 0)
    places = []
    for name in rng.choices(names, values, k=blocks * _BLOCK):
        places.append((name, taken[name]))
        taken[name] += 1
    return tuple(places)
