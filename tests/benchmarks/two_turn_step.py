"""A made-up step of `experiments/rlcr.yaml`: its problems and rewards, turns of any length.

Texts have about four characters to a token, as those of a large vocabulary have, and say what a
demonstration says: its working is repeated until an answer is long enough. Tokens are random.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from shapes import Shape

from rlx.checks import read_spec
from rlx.plugin import Problem
from rlx.recipe import Recipe, build_recipe
from rlx.rollout import NO_PARENT, RolloutTree, Segment, Span
from rlx.seeding import derive_seed

sys.path.insert(0, str(Path(__file__).parents[1]))
from sampled import pieces

__all__ = ["build_shape", "build_step_recipe", "build_trees", "pieces"]

ROOT = Path(__file__).parents[2]
PROMPT, QUESTION, CONFIDENCE = 100, 20, 80
"""Tokens of a prompt, of what asks for a confidence, and of a confidence."""
ANSWERS, CONFIDENCES = 4, 4
"""Branches, as in `experiments/rlcr.yaml`."""
VOCABULARY = 150_000
CHARACTERS = 4
"""Of a token."""
TAGGED = 10
"""Tokens of the last span of a turn, with its tags."""


def build_shape(rollouts: int, tokens: int) -> Shape:
    """Lengths and branches of a step.

    Args:
        rollouts: paths from a prompt to a confidence; fewer where that is no multiple of 16.
        tokens: of each path.
    """
    answer = tokens - PROMPT - QUESTION - CONFIDENCE
    if answer < 2 * TAGGED or rollouts < ANSWERS * CONFIDENCES:
        raise ValueError(f"{rollouts} rollouts of {tokens} tokens are too few")
    prompts = rollouts // (ANSWERS * CONFIDENCES)
    return Shape(prompts, PROMPT, answer, QUESTION, CONFIDENCE, ANSWERS, CONFIDENCES)


def build_step_recipe(shape: Shape) -> Recipe:
    """The joint phase of the experiment, with the step's sizes."""
    rollout = {
        "prompts_per_step": shape.prompts,
        "num_generations_answer": shape.answers,
        "num_generations_confidence": shape.confidences,
        "answer.max_new_tokens": shape.answer,
        "confidence.max_new_tokens": shape.confidence,
    }
    sizes = [f"rollout.{name}={value}" for name, value in rollout.items()]
    phases = "phases=[{name: joint, steps: 1}]"
    spec = read_spec(ROOT / "experiments" / "rlcr.yaml", [phases, *sizes]).spec
    return build_recipe(spec.resolve_phase_spec(spec.phases[0]))


def build_trees(shape: Shape, recipe: Recipe, numbers: Sequence[int]) -> list[RolloutTree]:
    """The trees of the problems with these numbers; the same whoever makes them up."""
    return [_build_tree(shape, recipe, number) for number in numbers]


def _build_tree(shape: Shape, recipe: Recipe, number: int) -> RolloutTree:
    rng = np.random.default_rng(number)
    problem = recipe.task.problem("train", number, derive_seed(recipe.spec.seed, "train"))
    question = _draw_ids(rng, shape.question)
    segments = [
        Segment(
            parent=NO_PARENT,
            author="prompt",
            token_ids=_draw_ids(rng, shape.prompt),
            text=problem.prompt.ljust(CHARACTERS * shape.prompt),
        )
    ]
    for branch in range(shape.answers):
        said = _write_turns(recipe, problem, CHARACTERS * shape.answer, branch)
        segments.append(_build_turn(rng, 0, 1, "answer", shape.answer, said[0]))
        segments.append(Segment(parent=len(segments) - 1, author="prompt", token_ids=question))
        asked = len(segments) - 1
        for tenth in range(shape.confidences):
            text = re.sub(r"(?<=<confidence>)[^<]*", f"0.{1 + 2 * tenth}", said[1])
            turn = _build_turn(rng, asked, 2, "confidence", shape.confidence, text)
            segments.append(turn)
    return RolloutTree(problem, tuple(segments))


def _write_turns(recipe: Recipe, problem: Problem, length: int, branch: int) -> tuple[str, str]:
    """Answer and confidence of a demonstration, the answer of about as many characters."""
    text = recipe.demonstrations.demonstration(problem, branch).turns[0]
    answer, end, confidence = text.partition("</answer>")
    begin, working, rest = re.split(r"(?s)(?<=<think>)(.*?)(?=</think>)", answer, maxsplit=1)
    times = max(1, (length - len(begin + rest + end)) // max(1, len(working)))
    return f"{begin}{working * times}{rest}{end}", confidence


def _build_turn(
    rng: np.random.Generator, parent: int, number: int, kind: str, length: int, text: str
) -> Segment:
    """A turn of two spans, the last of them short."""
    apart = length - TAGGED
    places = {0: (0, apart), 1: (apart, length)}
    names = re.findall(r"<(\w+)>", text)
    return Segment(
        parent=parent,
        author="policy",
        token_ids=_draw_ids(rng, length),
        turn=number,
        kind=kind,
        logprobs=tuple((-rng.standard_exponential(length, dtype=np.float32)).tolist()),
        finish_reason="stop",
        text=text,
        spans={
            name: Span(
                places[at],
                (places[at][0] + 1, places[at][1] - 1),
                text.partition(f"<{name}>")[2].partition(f"</{name}>")[0],
            )
            for at, name in enumerate(names)
        },
        hull=(0, length),
    )


def _draw_ids(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, VOCABULARY, length).tolist())
