"""Renders a task's demonstrations as tokenized dialogues with a scripted policy."""

from collections.abc import Iterator
from dataclasses import dataclass

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
            return _iterate_environment_turns(
                build_talk(rollout), problem, seed, dialogue, self.task, self.environment
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


def _iterate_environment_turns(
    plan: EnvironmentPlan,
    problem: Problem,
    seed: int,
    dialogue: ModelDialogue,
    task: Rehearsed,
    environment: Environment,
) -> Iterator[_TurnTokens]:
    """Plays the scripted policy against the environment, turn by turn, as `rlx.rollout` does."""
    host = LocalHost(environment)
    (state,) = host.reset([(problem.fields, derive_seed(seed, "environment"))])
    turns: list[str] = []
    observations: list[str] = []
    opening = plan.opening(problem, dialogue).token_ids
    for number in range(1, plan.last + 1):
        text = task.act(problem, turns, observations, seed)
        turn = _encode_turn(dialogue, text, plan)
        yield _TurnTokens(opening, turn)
        parsed = _parse_turn(dialogue, turn, plan, number)
        (step,) = host.step([(state, plan.action(*parsed, number, "stop"))])
        if not isinstance(step, Step) or step.done or number == plan.last:
            return
        observation = dialogue.encode_observation(
            plan.build_turn_text(step.observation, number + 1), turn, inline=plan.inline
        )
        turns.append(text)
        observations.append(observation.text)
        opening, state = observation.token_ids, step.state
