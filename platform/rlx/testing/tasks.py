"""Checks for tasks."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, get_args
from unittest import SkipTest

from rlx.plugin import Demonstration, Problem, Rehearsed, Split
from rlx.testing.promise import (
    PromiseCheck,
    Promises,
    Subject,
    build_subject_plugin,
    run_checks,
    run_in_worker,
)

_COUNT = 50
"""Problems to check per split and seed."""
_SEEDS = (0, 1)

_Place = tuple[Split, int, int]
"""Split, index and seed."""

_PLACES: tuple[_Place, ...] = tuple(
    (split, index, seed) for split in get_args(Split) for seed in _SEEDS for index in range(_COUNT)
)
_promise = Promises()


def check_task(task: Subject) -> None:
    """Raises AssertionError, naming the broken promise, unless a task keeps them all: a class,
    checked with its default options, or an instance."""
    run_checks(task_checks(), task)


def task_checks() -> tuple[PromiseCheck, ...]:
    return _promise.build_checks(lambda run, subject: run(build_subject_plugin(subject)))


def _list_problems(task: Any, places: Sequence[_Place]) -> list[dict[str, Any]]:
    task.check()
    return [_convert_problem(task.problem(*place), place) for place in places]


def _convert_problem(problem: Any, place: _Place) -> dict[str, Any]:
    if not isinstance(problem, Problem):
        raise TypeError(f"{_describe_problem(place)} is not a Problem but {type(problem).__name__}")
    return asdict(problem)


def _list_demonstrations(task: Any, places: Sequence[_Place]) -> list[tuple[str, ...]] | None:
    """The demonstrations at these places; None if the task has none."""
    try:
        demonstrations = [task.demonstration(task.problem(*p), seed=p[2]) for p in places]
    except NotImplementedError:
        return None
    for place, one in zip(places, demonstrations, strict=True):
        turns = one.turns if isinstance(one, Demonstration) else ()
        if not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise TypeError(
                f"{_describe_problem(place)}: {one!r} is not a Demonstration with text in its turns"
            )
    return [tuple(one.turns) for one in demonstrations]


def _list_lessons(task: Any, places: Sequence[_Place]) -> list[tuple[dict[str, Any], str]]:
    """The lessons at these places, ignoring the split, with their first turns."""
    opened = []
    for _, index, seed in places:
        lesson = task.lesson(index, seed)
        turn = task.act(lesson, (), (), seed)
        if not isinstance(turn, str) or not turn:
            raise TypeError(f"lesson {index} of seed {seed} opens with {turn!r}, not text")
        opened.append((_convert_problem(lesson, ("train", index, seed)), turn))
    return opened


def _describe_problem(place: _Place) -> str:
    return f"{place[0]} problem {place[1]} of seed {place[2]}"


def _compare_two_runs(
    ask: Callable[[Any, Sequence[_Place]], Any], task: Any, places: Sequence[_Place]
) -> Any:
    """Calls twice, in two processes and in reverse order the second time; returns the results."""
    first = run_in_worker(ask, task, places)
    if first is None:
        return None
    second = run_in_worker(ask, task, places[::-1], fresh=True)
    for place, one, other in zip(places, first, second[::-1], strict=True):
        assert one == other, (
            f"{_describe_problem(place)} is {one!r} the first time and {other!r} the second"
        )
    return first


@_promise(
    "returns complete problems",
    "return a Problem with an id and a prompt; its fields are plain JSON values",
)
def _check_problem_fields(task: Any) -> None:
    drawn = run_in_worker(_list_problems, task, _PLACES)
    for place, problem in zip(_PLACES, drawn, strict=True):
        what = _describe_problem(place)
        for name in ("id", "prompt"):
            text = problem[name]
            assert isinstance(text, str), f"{what}: its {name} is {text!r}, not text"
            assert text.strip(), f"{what}: its {name} is empty"
        try:
            again = json.loads(json.dumps(problem["fields"], allow_nan=False))
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{what}: fields are not JSON: {error}") from None
        odd = [n for n, v in problem["fields"].items() if n not in again or again[n] != v]
        assert not odd, f"{what}: fields are not plain JSON values: {', '.join(odd)}"


@_promise(
    "returns the same problem again",
    "derive everything from split, index and seed: `random.Random(f'{seed}/{split}/{i}')`",
)
def _check_problem_determinism(task: Any) -> None:
    _compare_two_runs(_list_problems, task, _PLACES)


@_promise(
    "keeps train and test disjoint",
    "let a hash of the problem decide its split, whatever the seed",
)
def _check_split_overlap(task: Any) -> None:
    drawn = run_in_worker(_list_problems, task, _PLACES)
    for what in ("id", "prompt"):
        train, test = (
            {
                (p[what], p["system"] if what == "prompt" else "")
                for p, (split, _, _) in zip(drawn, _PLACES, strict=True)
                if split == wanted
            }
            for wanted in get_args(Split)
        )
        shared = sorted(train & test)
        assert not shared, f"{len(shared)} with one {what} in both, such as {shared[0][0]!r}"


@_promise(
    "returns the same demonstration again",
    "derive everything from problem and seed; raise NotImplementedError if there are none",
)
def _check_demonstration_determinism(task: Any) -> None:
    places = _PLACES[:: len(_PLACES) // 20]
    if _compare_two_runs(_list_demonstrations, task, places) is None:
        message = "raises NotImplementedError: set `demonstrates = False`"
        assert not getattr(task, "demonstrates", True), message
        raise SkipTest("it has none, and cannot be used with `warm_start`")


@_promise(
    "returns the same lesson again",
    "derive `lesson` from index and seed, and `act` from its arguments; keep problems of the test "
    "split out of lessons",
)
def _check_lesson_determinism(task: Any) -> None:
    if not (isinstance(task, Rehearsed) and getattr(task, "demonstrates", True)):
        raise SkipTest("it has no `lesson` and `act`, which a warm start with an environment needs")
    lessons = _compare_two_runs(_list_lessons, task, _PLACES[: len(_PLACES) // 2])
    places = [place for place in _PLACES if place[0] == "test"]
    tests = {problem["id"] for problem in run_in_worker(_list_problems, task, places)}
    shared = sorted({problem["id"] for problem, _ in lessons} & tests)
    assert not shared, (
        f"{len(shared)} lessons are problems of the test split, such as {shared[0]!r}"
    )
