"""Renders a task's demonstrations as tokenized dialogues with a scripted policy."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.errors import PluginError
from rlx.model.dialogue import ModelDialogue
from rlx.plugin import Environment, Problem, Rehearsed, Step, Task
from rlx.rollout import (
    EnvironmentPlan,
    LocalHost,
    build_talk,
    encode_between_turns,
    encode_opening,
    fill_turn_template,
    find_spans,
)
from rlx.seeding import derive_seed
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec

__all__ = ["DemonstrationPlayer", "DemonstrationTokens"]


@dataclass(frozen=True, slots=True)
class DemonstrationTokens:
    """A tokenized demonstration.

    Attributes:
        token_ids: tokens of the whole dialogue.
        is_own: loss mask: True for the policy's tokens, including end-of-turn tokens.
    """

    token_ids: tuple[int, ...]
    is_own: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _TurnTokens:
    """A turn, and the prompt or observation tokens before it."""

    opening: tuple[int, ...]
    turn: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DemonstrationPlayer:
    """Plays an experiment's demonstrations; the result depends only on the demonstration's index.

    Attributes:
        spec: the experiment.
        task: the task that provides the demonstrations.
        environment: responds between turns; None if the schedule has none.
    """

    spec: ExperimentSpec
    task: Task
    environment: Environment | None = None

    def episode(self, dialogue: ModelDialogue, index: int) -> DemonstrationTokens:
        """Returns the tokens of demonstration number `index` of the warm start.

        Raises:
            SpecError: the vocabulary has no token for part of its text.
        """
        ids: list[int] = []
        own: list[bool] = []
        for tokens in self._iterate_turns(dialogue, index):
            ids += [*tokens.opening, *tokens.turn]
            own += [*[False] * len(tokens.opening), *[True] * len(tokens.turn)]
        return DemonstrationTokens(tuple(ids), tuple(own))

    def list_parts(self, dialogue: ModelDialogue, index: int) -> list[tuple[int, ...]]:
        """Returns the tokens of what is encoded as one text: each prompt and each turn."""
        turns = self._iterate_turns(dialogue, index)
        return [part for tokens in turns for part in (tokens.opening, tokens.turn)]

    def _iterate_turns(self, dialogue: ModelDialogue, index: int) -> Iterator[_TurnTokens]:
        seed = derive_seed(self.spec.seed, "demonstration", index)
        start = derive_seed(self.spec.seed, "warm start")
        rollout, rehearsed = self.spec.rollout, isinstance(self.task, Rehearsed)
        if isinstance(rollout, EnvironmentRolloutSpec) and (rehearsed or not rollout.has_one_turn):
            if self.environment is None or not isinstance(self.task, Rehearsed):
                raise ValueError(
                    "a warm start with an environment needs the environment and a task with lessons"
                )
            problem = self.task.lesson(index, start)
            talk = build_talk(rollout)
            return _iterate_environment_turns(
                *(talk, problem, seed, dialogue, self.task, self.environment),
                player=index % talk.players,
            )
        return self._iterate_demonstration_turns(
            dialogue, self.task.problem("train", index, start), seed
        )

    def _iterate_demonstration_turns(
        self, dialogue: ModelDialogue, problem: Problem, seed: int
    ) -> Iterator[_TurnTokens]:
        turn: tuple[int, ...] = ()
        rollout = self.spec.rollout
        texts = rollout.arrange_demonstration(self.task.demonstration(problem, seed).turns)
        for turn_spec, text in zip(rollout.turn_specs.values(), texts, strict=False):
            template = turn_spec.template
            if turn:
                prompt = fill_turn_template(dialogue, template, problem)
                opening = encode_between_turns(dialogue, prompt, turn)
            else:
                opening = encode_opening(dialogue, template, problem, rollout.system).token_ids
            stopped = text.endswith(turn_spec.stop) if turn_spec.stop else False
            turn = (*dialogue.encode(text), *(() if stopped else dialogue.end_ids[:1]))
            yield _TurnTokens(opening, turn)


def _encode_turn(dialogue: ModelDialogue, text: str, plan: EnvironmentPlan) -> tuple[int, ...]:
    """Returns the tokens of a turn; like a sampled turn, one with a stop string has no end
    token."""
    stopped = any(stop in text for stop in plan.turn.stop)
    return (*dialogue.encode(text), *(() if stopped else dialogue.end_ids[:1]))


def _parse_turn(
    dialogue: ModelDialogue, turn: tuple[int, ...], plan: EnvironmentPlan, number: int
) -> tuple[str, dict[str, str]]:
    """Returns the text and spans of a turn, parsed from its tokens like those of a sampled turn."""
    text, ends = dialogue.read(turn)
    spans = find_spans(text, ends, plan.turn.spans, first_turn=number == 1)
    return text, {name: span.text for name, span in spans.items()}


def _begin_episode(host: LocalHost, problem: Problem, seed: int) -> Any:
    try:
        (state,) = host.reset([(problem.fields, derive_seed(seed, "environment"))])
    except Exception as error:
        raise PluginError(
            f"rollout.environment: it cannot begin with the task's problem {problem.id!r}: "
            f"{type(error).__name__}: {error}; it may be made for the problems of another task"
        ) from error
    return state


def _iterate_environment_turns(
    plan: EnvironmentPlan,
    problem: Problem,
    seed: int,
    dialogue: ModelDialogue,
    task: Rehearsed,
    environment: Environment,
    player: int,
) -> Iterator[_TurnTokens]:
    """Plays the scripted policy against the environment, turn by turn, as `rlx.rollout` does.

    In self-play the script plays both players, and the turns of one are yielded.
    """
    host = LocalHost(environment)
    state = _begin_episode(host, problem, seed)
    sides = tuple(_ScriptedPlayer() for _ in range(plan.players))
    sides[0].opening = plan.opening(problem, dialogue).token_ids
    mover = 0
    while (side := sides[mover]).number <= plan.last:
        drawn = derive_seed(seed, "player", mover) if mover else seed
        text = task.act(problem, side.turns, side.observations, drawn)
        turn = _encode_turn(dialogue, text, plan)
        if mover == player:
            yield _TurnTokens(side.opening, turn)
        said, spans = _parse_turn(dialogue, turn, plan, side.number)
        whose = mover if plan.players > 1 else None
        action = plan.build_action(said, spans, side.number, player=whose)
        (step,) = host.step([(state, action)])
        side.turns.append(text)
        side.last_turn = turn
        if not isinstance(step, Step) or step.done:
            return
        state, mover = step.state, step.player if plan.players > 1 else mover
        sides[mover].read_observation(step.observation, plan, problem, dialogue)


@dataclass(slots=True)
class _ScriptedPlayer:
    """What a player has read and written in a demonstration.

    Attributes:
        opening: the tokens that it read before its next turn.
        turns: its turns so far, as texts; the tokens of the last are `last_turn`.
        observations: what it read between them.
    """

    opening: tuple[int, ...] = ()
    turns: list[str] = field(default_factory=list)
    last_turn: tuple[int, ...] = ()
    observations: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Number of its next turn."""
        return len(self.turns) + 1

    def read_observation(
        self, shown: str, plan: EnvironmentPlan, problem: Problem, dialogue: ModelDialogue
    ) -> None:
        """Reads an observation, which is the prompt of a second player before its first turn."""
        if not self.turns:
            seen = replace(problem, prompt=shown, allow_control_tokens=False)
            self.opening = plan.opening(seen, dialogue).token_ids
            return
        text = plan.build_turn_text(shown, self.number)
        observation = dialogue.encode_observation(text, self.last_turn, inline=plan.inline)
        self.observations.append(observation.text)
        self.opening = observation.token_ids
