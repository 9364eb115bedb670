"""Demonstrations as dialogues: what a scripted policy says, and what it is answered."""

from collections.abc import Iterator
from dataclasses import dataclass

from rlx.model.dialogue import ModelDialogue
from rlx.plugin import Environment, Problem, Rehearsed, Step, Task
from rlx.rollout import EnvironmentPlan, LocalHost, build_talk, encode_between_turns, find_spans
from rlx.seeding import derive_seed
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec

__all__ = ["DemonstrationPlayer", "DemonstrationTokens"]


@dataclass(frozen=True, slots=True)
class DemonstrationTokens:
    """A demonstration as tokens.

    Attributes:
        token_ids: all of the dialogue.
        is_own: whether the token is the policy's, its turns' ends included.
    """

    token_ids: tuple[int, ...]
    is_own: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _TurnTokens:
    """A turn, and the tokens that lead to it."""

    opening: tuple[int, ...]
    turn: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DemonstrationPlayer:
    """Where an experiment's demonstrations are acted out, one as good as any other of its index.

    Attributes:
        spec: the experiment.
        task: whose demonstrations they are.
        environment: what answers between turns; None where nothing does.
    """

    spec: ExperimentSpec
    task: Task
    environment: Environment | None = None

    def episode(self, dialogue: ModelDialogue, index: int) -> DemonstrationTokens:
        """Demonstration number `index` of the warm start, as tokens.

        Raises:
            SpecError: the vocabulary has no token for some of its text.
        """
        ids: list[int] = []
        own: list[bool] = []
        for said in self._iterate_turns(dialogue, index):
            ids += [*said.opening, *said.turn]
            own += [*[False] * len(said.opening), *[True] * len(said.turn)]
        return DemonstrationTokens(tuple(ids), tuple(own))

    def _iterate_turns(self, dialogue: ModelDialogue, index: int) -> Iterator[_TurnTokens]:
        seed = derive_seed(self.spec.seed, "demonstration", index)
        start = derive_seed(self.spec.seed, "warm start")
        if isinstance(self.spec.rollout, EnvironmentRolloutSpec):
            if self.environment is None or not isinstance(self.task, Rehearsed):
                raise ValueError("a schedule with an environment is rehearsed in it, by its task")
            problem = self.task.lesson(index, start)
            return _iterate_environment_turns(
                build_talk(self.spec.rollout), problem, seed, dialogue, self.task, self.environment
            )
        return self._iterate_demonstration_turns(
            dialogue, self.task.problem("train", index, start), seed
        )

    def _iterate_demonstration_turns(
        self, dialogue: ModelDialogue, problem: Problem, seed: int
    ) -> Iterator[_TurnTokens]:
        turn: tuple[int, ...] = ()
        demonstration = self.task.demonstration(problem, seed)
        for (_, asked), text in zip(
            self.spec.rollout.turn_specs.items(), demonstration.turns, strict=False
        ):
            shown = asked.template.replace("{prompt}", problem.prompt)
            system = problem.system or self.spec.rollout.system
            opening = (
                encode_between_turns(dialogue, shown, turn)
                if turn
                else dialogue.open(shown, system)
            )
            stopped = text.endswith(asked.stop) if asked.stop else False
            turn = (*dialogue.encode(text), *(() if stopped else dialogue.end_ids[:1]))
            yield _TurnTokens(opening, turn)


def _encode_turn(dialogue: ModelDialogue, text: str, plan: EnvironmentPlan) -> tuple[int, ...]:
    """Tokens of a turn; one that a stop string ends is sampled without an end token."""
    stopped = any(stop in text for stop in plan.turn.stop)
    return (*dialogue.encode(text), *(() if stopped else dialogue.end_ids[:1]))


def _parse_turn(
    dialogue: ModelDialogue, turn: tuple[int, ...], plan: EnvironmentPlan, number: int
) -> tuple[str, dict[str, str]]:
    """Text and spans of a turn, read off its tokens as those of a sampled one."""
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
    """The scripted policy and the environment, turn by turn, as `rlx.rollout` has them take it."""
    host = LocalHost(environment)
    (state,) = host.reset([(problem.fields, derive_seed(seed, "environment"))])
    turns: list[str] = []
    observations: list[str] = []
    opening = plan.opening(problem, dialogue).token_ids
    for number in range(1, plan.last + 1):
        text = task.act(problem, turns, observations, seed)
        turn = _encode_turn(dialogue, text, plan)
        yield _TurnTokens(opening, turn)
        heard = _parse_turn(dialogue, turn, plan, number)
        (step,) = host.step([(state, plan.action(*heard, number, "stop"))])
        if not isinstance(step, Step) or step.done or number == plan.last:
            return
        shown = dialogue.encode_observation(
            plan.build_turn_text(step.observation, number + 1), turn, inline=plan.inline
        )
        turns.append(text)
        observations.append(shown.text)
        opening, state = shown.token_ids, step.state
