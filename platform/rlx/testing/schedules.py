"""Checks for schedules, with a session that draws random text in place of a model."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import SkipTest

from rlx.errors import RlxError
from rlx.plugin import Message, Problem, TurnSpec
from rlx.rollout import (
    Completion,
    CompletionRequest,
    RolloutPlan,
    RolloutTree,
    TurnPrompt,
    build_rollout_plan,
    sample_rollout_trees,
)
from rlx.testing.promise import PromiseCheck, Promises, build_subject_plugin, run_checks

_END = 256
"""Token that ends a turn; lower ones are bytes."""
_PROBLEMS = tuple(Problem(id=f"p{i}", prompt=f"What is {i} + {i}?", fields={}) for i in range(3))
_SEEDS = (11, 12, 13)


_promise = Promises()


def check_schedule(plugin: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `Schedule` keeps them all."""
    run_checks(schedule_checks(), plugin)


def schedule_checks() -> tuple[PromiseCheck, ...]:
    def call(run: Callable[[RolloutPlan], None], subject: Any) -> None:
        plan = build_rollout_plan(build_subject_plugin(subject))
        if plan.talk is not None:
            raise SkipTest("an environment answers its turns")
        try:
            run(plan)
        except RlxError as error:
            raise AssertionError(str(error)) from error

    return _promise.build_checks(call)


@_promise(
    "samples the turns that it declares",
    "return one tree per problem, with the kinds and at most the numbers of `counts`",
)
def _check_declared_turns(plan: RolloutPlan) -> None:
    for tree in _sample_trees(plan, _PROBLEMS):
        found = {segment.kind for segment in tree.segments if segment.author == "policy"}
        missing = [level.kind for level in plan.levels if level.kind not in found]
        assert not missing, f"never samples a turn {missing[0]!r}"


@_promise(
    "samples the same from the same seeds",
    "derive the seed of every turn from the problem's by `rlx.seeding.derive_seed`",
)
def _check_same_seeds(plan: RolloutPlan) -> None:
    once, again = (_sample_trees(plan, _PROBLEMS) for _ in range(2))
    assert once == again, "two calls with the same seeds give different trees"


@_promise(
    "samples a problem alike whatever is beside it",
    "use a problem's own seed and its turns' places in the tree, not places in the batch",
)
def _check_other_problems(plan: RolloutPlan) -> None:
    alone, beside = _sample_trees(plan, _PROBLEMS[:1]), _sample_trees(plan, _PROBLEMS)
    assert alone[0] == beside[0], "another problem of the batch changes a tree"


@_promise(
    "samples one first turn where an evaluation asks for one",
    "read the numbers of turns from the settings that the function receives",
)
def _check_one_first_turn(plan: RolloutPlan) -> None:
    one = plan.copy_with_sampling(1)
    for tree in _sample_trees(one, _PROBLEMS):
        found = Counter(segment.turn for segment in tree.segments if segment.author == "policy")
        assert found[1] == 1, f"samples {found[1]} first turns"


def _sample_trees(plan: RolloutPlan, problems: Sequence[Problem]) -> list[RolloutTree]:
    seeds = _SEEDS[: len(problems)]
    dialogue: Any = ByteDialogue()  # no promise calls tools
    return sample_rollout_trees(plan, problems, seeds, RandomSession(), dialogue)


class RandomSession:
    """A sampling session that fills a turn's spans with random letters."""

    context_length = 1 << 20

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        return [
            tuple(self._complete(seed, sampling) for seed in request.seeds) for request in requests
        ]

    def _complete(self, seed: int, sampling: TurnSpec) -> Completion:
        draw = random.Random(seed)
        words = ["".join(draw.choices("abcdef", k=6)) for _ in (*sampling.spans, "")]
        tags = [f"<{n}>{word}</{n}>" for n, word in zip(sampling.spans, words, strict=False)]
        ids = (*"\n".join(tags or words).encode(), _END)[: sampling.max_new_tokens]
        return Completion(ids, (-1.0,) * len(ids), "stop" if ids[-1] == _END else "length")


class ByteDialogue:
    """A dialogue with one token per byte."""

    def open(
        self,
        text: str,
        system: str = "",
        history: Sequence[Message] = (),
        prefix: str = "",
        tools: Sequence[Any] = (),
    ) -> tuple[int, ...]:
        said = "".join(message.content for message in history)
        return (*f"{system}{said}{text}".encode(), _END, *prefix.encode())

    def reply(self, text: str, after: Sequence[int], prefix: str = "") -> tuple[int, ...]:
        return (*text.encode(), _END, *prefix.encode())

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        ends = [0]
        for token in token_ids:
            ends.append(ends[-1] + (token != _END))
        return bytes(t for t in token_ids if t != _END).decode("latin-1"), tuple(ends[1:])

    def break_control_tokens(self, text: str) -> str:
        return text

    def encode_observation(
        self, text: str, after: Sequence[int], *, inline: bool, prefix: str = ""
    ) -> TurnPrompt:
        return TurnPrompt(text, self.reply(text, after, prefix))
