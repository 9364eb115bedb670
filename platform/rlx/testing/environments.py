"""Checks for environments. Plugin authors: call `check_environment`, or parametrise by
`environment_checks`.

    @pytest.mark.parametrize("check", environment_checks(), ids=str)
    def test_keeps(check):
        check(MyEnvironment)

Environments run as in training: in a worker process with a deadline and a memory cap.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import SkipTest

from rlx.plugin import Action, Environment, Episode, Plugin, Step
from rlx.rollout import EnvironmentHost, HostFault, find_spans
from rlx.testing.promise import (
    PromiseCheck,
    Subject,
    build_subject_plugin,
    common_checks,
    open_environment_host,
    run_checks,
)
from rlx.testing.rewards import HOSTILE_TEXTS

_SEED = 7
_ORDINARY = ("42", "<think>6*7=42</think><answer>6*7</answer>", "?")
_HOSTILE = {
    **HOSTILE_TEXTS,
    "tags of an environment": "</information><answer>Paris</answer><information>" * 100,
    "half a tag": "<answer",
}

_Given = tuple[Mapping[str, Any], ...] | None


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
    """Returns the checks for environments.

    Args:
        problems: see `check_environment`.
    """
    extra_problems = None if problems is None else tuple(problems)
    own: tuple[tuple[str, str, Any], ...] = (
        (
            "returns a Step",
            "return a Step whose kind is one of `kinds`, with text as observation, plain JSON as "
            "info, and a state of plain values",
            _check_step_answers,
        ),
        (
            "matches its examples",
            "the environment is wrong, or the example is",
            _check_environment_examples,
        ),
        (
            "repeats its steps",
            "depend on the state, the action and the options alone: no clock, no random numbers "
            "but from the seed of `reset`, nothing kept between calls",
            _check_environment_determinism,
        ),
        (
            "does not modify states",
            "return a changed copy as the next state: `dataclasses.replace(state, ...)`",
            _check_states_unchanged,
        ),
        (
            "tolerates hostile text",
            "what a model writes is never an error: answer it with a kind of its own, in linear "
            "time",
            _check_hostile_actions,
        ),
        (
            "plays both players",
            "with an `Action.player`, take the turn of that player, and name the next one in "
            "`Step.player`; the first observation of player 1 is its prompt",
            _check_both_players,
        ),
    )
    return (
        *common_checks(_build_first_environment),
        *(
            PromiseCheck(name, help_, partial(run, extra_problems=extra_problems))
            for name, help_, run in own
        ),
    )


# Episodes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _EpisodeCase:
    """An environment and a rollout to try it with."""

    environment: Environment
    episode: Episode

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

    def play_episode(self, *, watched: bool = False) -> list[Step]:
        """Returns the steps of the episode, up to the first that is done.

        Raises:
            AssertionError: the environment failed.
        """
        environment: Any = _WatchedEnvironment(self.environment) if watched else self.environment
        with open_environment_host(environment) as host:
            return self.play_on(host)

    def play_on(self, host: EnvironmentHost) -> list[Step]:
        """Like `play_episode`, in a worker that is there.

        Raises:
            AssertionError: the environment failed.
        """
        steps: list[Step] = []
        state = self.begin_on(host)
        player, taken = 0, [0, 0]
        for number, text in enumerate(self.episode.turns, start=1):
            taken[player] += 1
            (step,) = host.step([(state, self.action(taken[player], text, player=player))])
            what = f"turn {number}, {_shorten_turn_text(text)}"
            steps.append(self.assert_answered(step, what))
            if steps[-1].done:
                return steps
            state = steps[-1].state
            player = steps[-1].player if self.episode.self_play else 0
        host.release([state])
        return steps

    def begin_on(self, host: EnvironmentHost) -> Any:
        """Returns the first state.

        Raises:
            AssertionError: the environment failed.
        """
        (state,) = host.reset([(self.episode.problem, _SEED)])
        return self.assert_answered(state, "its reset")

    def assert_answered(self, answer: Any, what: str) -> Any:
        """Returns what a worker answered.

        Raises:
            AssertionError: the environment failed.
        """
        hint = "" if self.environment.examples else "; give it examples, with a problem to play"
        assert not isinstance(answer, HostFault), f"{self}: {what}: {answer.reason}{hint}"
        return answer

    def __str__(self) -> str:
        return f"'{self.episode.name}'"


def _shorten_turn_text(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")


def _build_first_environment(subject: Subject) -> Any:
    """The instance itself, or the class with the options of its first example."""
    examples = getattr(subject, "examples", ())
    if isinstance(subject, Plugin) or not examples:
        return build_subject_plugin(subject)
    return build_subject_plugin(subject, examples[0].options)


def _build_example_cases(subject: Subject) -> list[_EpisodeCase]:
    """One case per example, with the example's options."""
    return [
        _EpisodeCase(build_subject_plugin(subject, e.options), e)
        for e in getattr(subject, "examples", ())
    ]


def _build_episode_cases(subject: Subject, extra_problems: _Given) -> list[_EpisodeCase]:
    """The examples, plus ordinary turns on the problems; an empty problem if there is neither."""
    examples = _build_example_cases(subject)
    if isinstance(subject, Environment):
        examples = [replace(case, environment=subject) for case in examples]
    problems = extra_problems if extra_problems is not None else () if examples else ({},)
    plugin = _build_first_environment(subject)
    ordinary = (
        Episode(name=f"problem {n}", problem=problem, turns=_ORDINARY, kinds=())
        for n, problem in enumerate(problems)
    )
    return [*examples, *(_EpisodeCase(plugin, episode) for episode in ordinary)]


class _WatchedEnvironment:
    """Wraps an environment and detects changes to its inputs. As picklable as the environment."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.environment.kinds

    @property
    def replayable(self) -> bool:
        return self.environment.replayable

    def release(self, state: Any) -> None:
        self.environment.release(state)

    def reset(self, problem: Mapping[str, Any], seed: int) -> Any:
        """Calls the environment's `reset`.

        Raises:
            AssertionError: it changed the problem.
        """
        before = _copy_by_pickle(problem)
        state = self.environment.reset(problem, seed)
        assert problem == before, "it changed the problem that it received"
        return state

    def step(self, state: Any, action: Action) -> Step:
        """Calls the environment's `step` twice.

        Raises:
            AssertionError: it changed the state, or answered the same input differently.
        """
        first, second = _copy_by_pickle(state), _copy_by_pickle(state)
        step = self.environment.step(state, action)
        comparable = first == second
        assert not comparable or state == first, "it changed the state that it received"
        again = self.environment.step(state, action)
        assert _drop_state(step) == _drop_state(again), (
            "it answers the same state differently the second time"
        )
        return step


def _copy_by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _drop_state(step: Step) -> Step:
    return replace(step, state=None)


# Checks -------------------------------------------------------------------------------------------


def _check_step_answers(subject: Subject, extra_problems: _Given) -> None:
    for case in _build_episode_cases(subject, extra_problems):
        case.play_episode()


def _check_environment_examples(subject: Subject, extra_problems: _Given) -> None:
    cases = _build_example_cases(subject)
    if not cases:
        raise SkipTest("it has none; give it at least a gold, a poor and a hostile one")
    names = [case.episode.name for case in cases]
    assert len(set(names)) == len(names), f"two examples have one name: {sorted(names)}"
    for case in cases:
        steps, promised = case.play_episode(), case.episode
        kinds = tuple(step.kind for step in steps)
        assert kinds == promised.kinds, f"{case} has turns {kinds}, not {promised.kinds}"
        ended = steps[-1].done
        assert ended == promised.done, f"{case} {'ends' if ended else 'does not end'}"
        observations = tuple(step.observation for step in steps)
        message = f"{case} shows {observations}, not {promised.observations}"
        assert not promised.observations or observations == promised.observations, message


def _require_replayable(subject: Subject) -> None:
    if not _build_first_environment(subject).replayable:
        raise SkipTest("it is not replayable")


def _check_environment_determinism(subject: Subject, extra_problems: _Given) -> None:
    _require_replayable(subject)
    for cases in _group_by_options(_build_episode_cases(subject, extra_problems)):
        first, second = ([case.play_episode() for case in cases] for _ in range(2))
        with open_environment_host(cases[0].environment, fresh=True) as host:
            third = [case.play_on(host) for case in cases[::-1]][::-1]
        for name, others in (("the second time", second), ("in another process", third)):
            for case, steps, other in zip(cases, first, others, strict=True):
                same = [_drop_state(s) for s in steps] == [_drop_state(s) for s in other]
                assert same, f"{case}: different steps {name}"


def _check_states_unchanged(subject: Subject, extra_problems: _Given) -> None:
    _require_replayable(subject)
    for case in _build_episode_cases(subject, extra_problems):
        case.play_episode(watched=True)


def _check_hostile_actions(subject: Subject, extra_problems: _Given) -> None:
    for case, *_ in _group_by_options(_build_episode_cases(subject, extra_problems)):
        with open_environment_host(case.environment) as host:
            state = case.begin_on(host)
            actions = [
                (label, action)
                for label, text in _HOSTILE.items()
                for action in _build_hostile_actions(case, text)
            ]
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
                assert not isinstance(step, HostFault), (
                    f"the turn after hostile text: {step.reason}"
                )
            host.release([state, *(s.state for s in afterwards if isinstance(s, Step))])


def _check_both_players(subject: Subject, extra_problems: _Given) -> None:
    if not _build_first_environment(subject).self_play:
        raise SkipTest("it has one player: its `self_play` is False")
    cases = [case for case in _build_example_cases(subject) if case.episode.self_play]
    if not cases:
        raise SkipTest("no example is a game of both players: give it one with `self_play=True`")
    for case in cases:
        seconds = [s.observation for s in case.play_episode() if s.player == 1 and not s.done]
        assert seconds, f"{case}: player 1 never has a turn"
        assert seconds[0], f"{case}: player 1 reads nothing before its first turn"


def _build_hostile_actions(case: _EpisodeCase, text: str) -> Iterator[Action]:
    """Yields the text as a turn: as is, inside every span, and as a forced answer."""
    plain = case.action(1, text)
    yield plain
    yield replace(plain, spans=dict.fromkeys(case.episode.spans, text), finish_reason="length")
    yield replace(plain, spans={}, forced=True)


def _group_by_options(cases: Sequence[_EpisodeCase]) -> list[list[_EpisodeCase]]:
    """The cases of each set of options."""
    groups: dict[str, list[_EpisodeCase]] = {}
    for case in cases:
        groups.setdefault(case.environment.model_dump_json(), []).append(case)
    return list(groups.values())
