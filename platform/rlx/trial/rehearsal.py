"""Rollouts with a real environment and synthetic turns, without a model.

If a task has a script for its warm start, the turns come from that script, so that the environment
receives the kind of turns that it will receive from the model.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.errors import PluginError
from rlx.plugin import Action, Problem, Rehearsed, Step
from rlx.rollout import (
    Completion,
    CompletionRequest,
    EnvironmentHost,
    EnvironmentPlan,
    HostFault,
    derive_turn_seed,
)
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec, TurnSpec
from rlx.trial.responses import ROLES, ResponseAuthor, Role
from rlx.trial.stand_ins import TAGS, fit_to_vocabulary

__all__ = ["Rehearsal", "ScriptedPolicy"]


@dataclass(frozen=True, slots=True)
class ScriptedPolicy:
    """The scripted policy of a task. Failures are reported as the task's."""

    name: str
    task: Rehearsed

    @classmethod
    def from_experiment(cls, spec: ExperimentSpec, task: Rehearsed) -> "ScriptedPolicy | None":
        """Builds the scripted policy; None if the task's options leave it without lessons.

        Raises:
            PluginError: the task fails.
        """
        name = spec.task.plugin
        try:
            task.lesson(0, derive_seed(spec.seed, "warm start"))
        except NotImplementedError:
            return None
        except Exception as error:
            raise PluginError(_describe_task_failure(name, "lesson 0", error)) from error
        return cls(name, task)

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        """Returns the next turn; see `rlx.plugin.Rehearsed`.

        Raises:
            PluginError: the task fails.
        """
        try:
            return self.task.act(problem, turns, observations, seed)
        except Exception as error:
            what = f"`act`, turn {len(turns) + 1} of problem {problem.id}"
            raise PluginError(_describe_task_failure(self.name, what, error)) from error


def _describe_task_failure(name: str, what: str, error: Exception) -> str:
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"task plugin {name!r} failed on {what}: {type(error).__name__}: {why}"


@dataclass(slots=True)
class _Actor:
    """Author of one player's turns in a game.

    Attributes:
        game: number of the game among those of all problems.
        player: 1 for the second player.
        role: the defect of its turns: "untagged" omits the tags until the forced answer, "cut" runs
            out of tokens in its first turn.
        seed: seed of the episode.
        turns: texts as they were written, before any truncation.
        observations: text of the observation after each turn.
    """

    game: int
    player: int
    problem: Problem
    role: Role
    seed: int
    turns: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)


class Rehearsal:
    """A sampling session without a model, which also wraps the environment host.

    Implements `rlx.rollout.SamplingSession` and `rlx.rollout.EnvironmentHost`. Create one
    object per call of `rlx.rollout.sample_rollout_trees`.

    Args:
        author: writes the turns if there is no script.
        script: the task's scripted policy; None if it has none.
        problems: problems of the trees being sampled, in order.
        seeds: one per problem.
        talk: how rollouts and environment take turns.
        host: runs the environment.
        room: context length in tokens.
    """

    def __init__(
        self,
        author: ResponseAuthor,
        script: ScriptedPolicy | None,
        problems: Sequence[Problem],
        seeds: Sequence[int],
        talk: EnvironmentPlan,
        host: EnvironmentHost,
        room: int,
    ) -> None:
        self._author, self._script = author, script
        self._problems, self._seeds = problems, seeds
        self._talk, self._host = talk, host
        self._actors: dict[tuple[int, int], _Actor] = {}
        self._live: list[_Actor] = []
        self.context_length = room

    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        """Returns the initial states of all games, problem by problem."""
        seeds = [seed for _, seed in calls]
        self._actors = {
            (game, player): self._build_actor(game, player, seeds)
            for game in range(len(calls))
            for player in range(self._talk.players)
        }
        return self._host.reset(calls)

    def _build_actor(self, game: int, player: int, seeds: Sequence[int]) -> _Actor:
        tree, place = divmod(game, self._talk.count)
        at = place if self._talk.count > 1 else tree % 2
        role: Role = ROLES[at] if at < len(ROLES) else "any"
        of = game
        if role == "twin":  # repeats the first response
            role, of = ROLES[0], tree * self._talk.count
        seed = derive_seed(seeds[of], "rehearsal", *([player] if player else []))
        return _Actor(game, player, self._problems[tree], role, seed)

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """Returns the next turn of every unfinished game, whose actor its seed tells."""
        waiting = {self._derive_next_seed(actor): actor for actor in self._actors.values()}
        self._live = [waiting[seed] for request in requests for seed in request.seeds]
        actors = iter(self._live)
        return [
            tuple(self._turn(next(actors), seed, sampling) for seed in request.seeds)
            for request in requests
        ]

    def _derive_next_seed(self, actor: _Actor) -> int:
        tree, place = divmod(actor.game, self._talk.count)
        return derive_turn_seed(self._seeds[tree], place, len(actor.turns) + 1, actor.player)

    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        """Passes the turns to the environment and returns its steps."""
        steps = self._host.step(calls)
        for actor, step in zip(self._live, steps, strict=True):
            if isinstance(step, Step):
                player = step.player if self._talk.players > 1 else actor.player
                reader = self._actors[actor.game, player]
                if reader.turns:  # a second player's first observation is its prompt
                    following = len(reader.turns) + 1
                    text = self._talk.build_turn_text(step.observation, following)
                    reader.observations.append(text)
        return steps

    def _turn(self, actor: _Actor, seed: int, sampling: TurnSpec) -> Completion:
        number = len(actor.turns) + 1
        text = self._text(actor)
        actor.turns.append(text)
        if actor.role == "untagged" and number <= self._talk.max_turns:
            bare = TAGS.sub("", text)
            text = fit_to_vocabulary(self._author.speech, bare) if bare.strip() else text
        cut = actor.role == "cut" and number == 1
        return self._author.completion(text, sampling, cut=cut, seed=seed)

    def _text(self, actor: _Actor) -> str:
        if self._script is not None:
            text = self._script.act(actor.problem, actor.turns, actor.observations, actor.seed)
            return fit_to_vocabulary(self._author.speech, text)
        number = len(actor.turns)
        drawn = derive_seed(actor.seed, number)
        confidence = f"0.{random.Random(drawn).randint(1, 9)}"
        return self._author.write_response_text(
            actor.problem, number, drawn, actor.role, confidence
        )
