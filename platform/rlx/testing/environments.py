"""Checks for environments, which run as in training: in a worker with a deadline."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any
from unittest import SkipTest

from rlx.plugin import Action, Environment, Episode, Step
from rlx.rollout import EnvironmentHost, HostFault, find_spans
from rlx.testing.promise import (
    PromiseCheck,
    Promises,
    Subject,
    build_first_plugin,
    build_subject_plugin,
    open_environment_host,
    run_checks,
    shorten_text,
)
from rlx.testing.rewards import HOSTILE_TEXTS

_SEED = 7
_ORDINARY = ("42", "<think>6*7=42</think><answer>6*7</answer>", "?")
_HOSTILE = {
    **HOSTILE_TEXTS,
    "tags of an environment": "</information><answer>Paris</answer><information>" * 100,
    "half a tag": "<answer",
}
_promise = Promises()


def check_environment(
    environment: Subject, problems: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Raises AssertionError, naming the broken promise, unless an environment keeps them all.

    Args:
        environment: a class, checked with the options of each of its examples, or an instance.
        problems: task records to try in addition to those of the examples.
    """
    run_checks(environment_checks(problems), environment)


def environment_checks(
    problems: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[PromiseCheck, ...]:
    """The checks for environments; see `check_environment`."""

    def call(run: Callable[[Subject, list[_EpisodeCase]], None], subject: Subject) -> None:
        run(subject, _build_episode_cases(subject, problems))

    return _promise.build_checks(call)


@dataclass(frozen=True, slots=True)
class _EpisodeCase:
    environment: Environment
    episode: Episode

    def __str__(self) -> str:
        return f"'{self.episode.name}'"

    def action(self, number: int, text: str, *, player: int = 0) -> Action:
        """Turn number `number` of a player, as a run would pass it to the environment."""
        ends = range(1, len(text) + 1)
        found = find_spans(text, ends, self.episode.spans, first_turn=number == 1)
        return Action(
            text=text,
            spans={name: span.text for name, span in found.items()},
            number=number,
            turns_left=max(0, len(self.episode.turns) - number),
            player=player if self.episode.self_play else None,
        )

    def play(self, *, watched: bool = False) -> list[Step]:
        """The steps of the episode, up to the first that is done."""
        environment: Any = _WatchedEnvironment(self.environment) if watched else self.environment
        with open_environment_host(environment) as host:
            return self.play_on(host)

    def play_on(self, host: EnvironmentHost) -> list[Step]:
        steps: list[Step] = []
        state = self.begin_on(host)
        player, taken = 0, [0, 0]
        for number, text in enumerate(self.episode.turns, start=1):
            taken[player] += 1
            (step,) = host.step([(state, self.action(taken[player], text, player=player))])
            what = f"turn {number}, {shorten_text(text)!r}"
            steps.append(self._require_answer(step, what))
            if steps[-1].done:
                return steps
            state = steps[-1].state
            player = steps[-1].player if self.episode.self_play else 0
        host.release([state])
        return steps

    def begin_on(self, host: EnvironmentHost) -> Any:
        (state,) = host.reset([(self.episode.problem, _SEED)])
        return self._require_answer(state, "its reset")

    def _require_answer(self, answer: Any, what: str) -> Any:
        hint = "" if self.environment.examples else "; give it examples, with a problem to play"
        assert not isinstance(answer, HostFault), f"{self}: {what}: {answer.reason}{hint}"
        return answer


def _build_example_cases(subject: Subject) -> list[_EpisodeCase]:
    return [
        _EpisodeCase(build_subject_plugin(subject, e.options), e)
        for e in getattr(subject, "examples", ())
    ]


def _build_episode_cases(
    subject: Subject, problems: Sequence[Mapping[str, Any]] | None
) -> list[_EpisodeCase]:
    """The examples, plus ordinary turns on the problems; an empty problem if there is neither."""
    cases = _build_example_cases(subject)
    if isinstance(subject, Environment):
        cases = [replace(case, environment=subject) for case in cases]
    plugin = build_first_plugin(subject)
    for number, problem in enumerate(problems or (() if cases else ({},))):
        episode = Episode(name=f"problem {number}", problem=problem, turns=_ORDINARY, kinds=())
        cases.append(_EpisodeCase(plugin, episode))
    return cases


class _WatchedEnvironment:
    """Wraps an environment and detects changes to its inputs."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.kinds, self.replayable = environment.kinds, environment.replayable
        self.release = environment.release

    def reset(self, problem: Mapping[str, Any], seed: int) -> Any:
        before = deepcopy(problem)
        state = self.environment.reset(problem, seed)
        assert problem == before, "it changed the problem that it received"
        return state

    def step(self, state: Any, action: Action) -> Step:
        first, second = (pickle.loads(pickle.dumps(state)) for _ in range(2))
        step = self.environment.step(state, action)
        comparable = first == second
        assert not comparable or state == first, "it changed the state that it received"
        again = self.environment.step(state, action)
        same = replace(step, state=None) == replace(again, state=None)
        assert same, "it answers the same state differently the second time"
        return step


@_promise(
    "returns a Step",
    "return a Step whose kind is one of `kinds`, with text as observation, plain JSON as info, and "
    "a state of plain values",
)
def _check_step_answers(_: Subject, cases: list[_EpisodeCase]) -> None:
    for case in cases:
        case.play()


@_promise("matches its examples", "the environment is wrong, or the example is")
def _check_environment_examples(subject: Subject, _: list[_EpisodeCase]) -> None:
    cases = _build_example_cases(subject)
    if not cases:
        raise SkipTest("it has none; give it at least a gold, a poor and a hostile one")
    names = [case.episode.name for case in cases]
    assert len(set(names)) == len(names), f"two examples have one name: {sorted(names)}"
    for case in cases:
        steps, promised = case.play(), case.episode
        kinds = tuple(step.kind for step in steps)
        assert kinds == promised.kinds, f"{case} has turns {kinds}, not {promised.kinds}"
        ended = steps[-1].done
        assert ended == promised.done, f"{case} {'ends' if ended else 'does not end'}"
        observations = tuple(step.observation for step in steps)
        message = f"{case} shows {observations}, not {promised.observations}"
        assert not promised.observations or observations == promised.observations, message


@_promise(
    "repeats its steps",
    "depend on the state, the action and the options alone: no clock, no random numbers but from "
    "the seed of `reset`, nothing kept between calls",
)
def _check_environment_determinism(_: Subject, cases: list[_EpisodeCase]) -> None:
    _require_replayable(cases)
    for group in _group_by_options(cases):
        first, second = ([case.play() for case in group] for _ in range(2))
        with open_environment_host(group[0].environment, fresh=True) as host:
            third = [case.play_on(host) for case in group[::-1]][::-1]
        for name, others in (("the second time", second), ("in another process", third)):
            for case, steps, other in zip(group, first, others, strict=True):
                one, two = ([replace(s, state=None) for s in run] for run in (steps, other))
                assert one == two, f"{case}: different steps {name}"


@_promise(
    "does not modify states",
    "return a changed copy as the next state: `dataclasses.replace(state, ...)`",
)
def _check_states_unchanged(_: Subject, cases: list[_EpisodeCase]) -> None:
    _require_replayable(cases)
    for case in cases:
        case.play(watched=True)


def _require_replayable(cases: list[_EpisodeCase]) -> None:
    if not cases[0].environment.replayable:
        raise SkipTest("it is not replayable")


@_promise(
    "tolerates hostile text",
    "what a model writes is never an error: answer it with a kind of its own, in linear time",
)
def _check_hostile_actions(_subject: Subject, cases: list[_EpisodeCase]) -> None:
    for case, *_ in _group_by_options(cases):
        with open_environment_host(case.environment) as host:
            state = case.begin_on(host)
            actions = []
            for label, text in _HOSTILE.items():
                plain = case.action(1, text)
                within = dict.fromkeys(case.episode.spans, text)
                actions.append((label, plain))
                actions.append((label, replace(plain, spans=within, finish_reason="length")))
                actions.append((label, replace(plain, spans={}, forced=True)))
            # One that is not replayable does not go back to its first state.
            branches = case.environment.replayable
            firsts = [state if branches else case.begin_on(host) for _ in actions]
            pairs = zip(firsts, actions, strict=True)
            steps = host.step([(first, action) for first, (_, action) in pairs])
            for (label, _), step in zip(actions, steps, strict=True):
                assert not isinstance(step, HostFault), f"{label}: {step.reason}"
            going = [s.state for s in steps if isinstance(s, Step) and not s.done]
            action = case.action(2, case.episode.turns[0])
            afterwards = host.step([(state, action) for state in going])
            for step in afterwards:
                why = step.reason if isinstance(step, HostFault) else ""
                assert not why, f"the turn after hostile text: {why}"
            host.release([state, *(s.state for s in afterwards if isinstance(s, Step))])


@_promise(
    "plays both players",
    "with an `Action.player`, take the turn of that player, and name the next one in "
    "`Step.player`; the first observation of player 1 is its prompt",
)
def _check_both_players(subject: Subject, _: list[_EpisodeCase]) -> None:
    if not build_first_plugin(subject).self_play:
        raise SkipTest("it has one player: its `self_play` is False")
    cases = [case for case in _build_example_cases(subject) if case.episode.self_play]
    if not cases:
        raise SkipTest("no example is a game of both players: give it one with `self_play=True`")
    for case in cases:
        seconds = [s.observation for s in case.play() if s.player == 1 and not s.done]
        assert seconds, f"{case}: player 1 never has a turn"
        assert seconds[0], f"{case}: player 1 reads nothing before its first turn"


def _group_by_options(cases: Sequence[_EpisodeCase]) -> list[list[_EpisodeCase]]:
    groups: dict[str, list[_EpisodeCase]] = {}
    for case in cases:
        groups.setdefault(case.environment.model_dump_json(), []).append(case)
    return list(groups.values())
