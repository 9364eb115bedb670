"""Which problems a model can be shown: those whose prompt fits."""

from collections.abc import Callable
from dataclasses import dataclass

from rlx.errors import SpecError
from rlx.plugin import Problem
from rlx.rollout.dialogue import (
    Dialogue,
    encode_between_turns,
    encode_opening,
    fill_turn_template,
)
from rlx.rollout.schedule import RolloutPlan
from rlx.spec import PromptLimit

MOST_DROPPED = 1000
"""Problems in a row whose prompts are too long before a draw gives up."""


@dataclass(frozen=True, slots=True)
class PromptLength:
    """Tokens that a problem needs: those before the first turn, and those of the longest dialogue,
    which with an environment, whose observations nobody knows, ends with the first turn."""

    prompt: int
    dialogue: int


def measure_prompt(plan: RolloutPlan, problem: Problem, dialogue: Dialogue) -> PromptLength:
    first, *below = plan.levels
    turn = first.turn
    tools = plan.talk.tools if plan.talk is not None else ()
    opening = encode_opening(
        *(dialogue, turn.template, problem), plan.system, plan.examples, turn.prefix, tools
    )
    prompt = len(opening.token_ids)
    total = prompt + turn.max_new_tokens
    for level in below:
        text = fill_turn_template(dialogue, level.turn.template, problem)
        between = encode_between_turns(dialogue, text, (), level.turn.prefix)
        total += len(between) + level.turn.max_new_tokens
    return PromptLength(prompt, total)


@dataclass(frozen=True, slots=True)
class DrawnProblems:
    """Consecutive problems of a split that fit, with their numbers in it, of `examined` numbers."""

    problems: tuple[Problem, ...]
    numbers: tuple[int, ...]
    examined: int

    @property
    def dropped(self) -> int:
        return self.examined - len(self.problems)


@dataclass(frozen=True, slots=True)
class PromptFit:
    """Applies `rollout.max_prompt_tokens`; without a `rule` every problem is shown."""

    plan: RolloutPlan
    dialogue: Dialogue
    context_length: int
    rule: PromptLimit | None

    def draw_train(
        self,
        get_problem: Callable[[int], Problem],
        start: int,
        count: int,
    ) -> DrawnProblems:
        """Draws the first `count` problems from number `start` on that fit.

        Raises:
            SpecError: nothing fits, or there is no token for part of a problem.
        """
        found: dict[int, Problem] = {}
        number, dropped = start, 0
        while len(found) < count:
            problem = get_problem(number)
            if self.fits(problem):
                found[number] = problem
                dropped = 0
            elif (dropped := dropped + 1) > MOST_DROPPED:
                raise SpecError(
                    f"rollout.max_prompt_tokens drops {MOST_DROPPED} problems in a row, up to "
                    f"number {number}: raise its limit or model.max_position"
                )
            number += 1
        return DrawnProblems((*found.values(),), (*found,), number - start)

    def draw_held_out(self, get_problem: Callable[[int], Problem], numbers: range) -> DrawnProblems:
        """Those of some held-out problems that fit; dropped ones are not replaced."""
        drawn = {number: get_problem(number) for number in numbers}
        found = {number: problem for number, problem in drawn.items() if self.fits(problem)}
        return DrawnProblems((*found.values(),), (*found,), len(numbers))

    def fits(self, problem: Problem) -> bool:
        return self.rule is None or not self.describe_excess(problem)

    def describe_excess(self, problem: Problem) -> str:
        """Says by how much a problem is too long; "" if it fits."""
        length, limit = measure_prompt(self.plan, problem, self.dialogue), self._limit
        if self._has_room(length):
            return ""
        if limit is not None and length.prompt > limit:
            return f"the prompt of {problem.id!r} has {length.prompt} tokens, more than {limit}"
        return (
            f"the prompt of {problem.id!r} has {length.prompt} tokens; with those of its turns "
            f"that makes {length.dialogue}, and the model's context has {self.context_length}"
        )

    def is_short(self, problem: Problem, frame: PromptLength) -> bool:
        """Whether a problem fits even if each byte of its text is a token; `frame` is that of no
        text."""
        if problem.system or problem.history:
            return False  # they have a frame of their own
        texts = [
            fill_turn_template(self.dialogue, level.turn.template, problem)
            for level in self.plan.levels
        ]
        first, *below = (len(text.encode()) for text in texts)
        longest = PromptLength(frame.prompt + first, frame.dialogue + first + sum(below))
        return self._has_room(longest)

    def _has_room(self, length: PromptLength) -> bool:
        within = self._limit is None or length.prompt <= self._limit
        return within and length.dialogue <= self.context_length

    @property
    def _limit(self) -> int | None:
        return self.rule.limit if self.rule is not None else None
