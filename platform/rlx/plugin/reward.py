"""Rewards, which score a turn or a whole rollout."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    Any,
    ClassVar,
    Literal,
    Protocol,
    cast,
    get_type_hints,
    overload,
    runtime_checkable,
)

from pydantic import create_model

from rlx.plugin.base import API, Plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn of one rollout, as a reward sees it. Its text is model output and untrusted.

    A reward of whole rollouts gets a rollout's last turn, with the earlier ones as context.

    Attributes:
        id: unique within the step.
        problem: the task's record, `Problem.fields`.
        turn: its kind: "answer", "confidence", ...
        number: from 1, in its rollout.
        response: text of this turn only, without the prompt.
        spans: content of each named span that was found, such as `{"answer": "3 + 4"}`.
        n_tokens: tokens that the policy wrote in this turn.
        context: text of the earlier turns, in order; empty for the first turn.
        observations: an environment's texts before this turn, in order.
        finish_reason: "stop", or "length" when the token budget ran out.
        info: what the environment reported for this turn.
        history: `info` of the earlier turns, in order.
        of: raw, unweighted value of the reward named by `of:` in YAML, for this turn or the
            nearest earlier one that has it; None when the reward has no `of`.
    """

    id: str
    problem: Mapping[str, Any]
    turn: str
    number: int
    response: str
    spans: Mapping[str, str] = field(default_factory=dict)
    n_tokens: int = 0
    context: tuple[str, ...] = ()
    observations: tuple[str, ...] = ()
    finish_reason: str = "stop"
    info: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[Mapping[str, Any], ...] = ()
    of: float | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """A reward's verdict.

    Attributes:
        value: a finite number.
        reason: why the value is what it is, such as "unparsable".
        parts: additional named figures to record; never summed.
    """

    value: float
    reason: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


Scope = Literal["sample", "siblings", "group"]
Verdict = Score | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An example input of a reward, with the verdict that its author promises.

    It may be gold, wrong or hostile. `rlx plugins check` verifies the verdict, and derives hostile
    inputs from the problem.

    Attributes:
        name: what it shows, such as "gold" or "no closing tag"; unique within a reward.
        sample: one sample; for wider scopes the whole group, as a tuple.
        value: promised value, None for an abstention; for wider scopes a tuple, in order.
        reason: promised reason; checked only if given and the scope is "sample".
        options: options of the plugin, as in YAML.
    """

    name: str
    sample: Sample | tuple[Sample, ...]
    value: float | tuple[float | None, ...] | None
    reason: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class RewardPlugin(Protocol):
    """The interface that rlx calls. `Reward` and `@reward` both implement it.

    A model's fault is a score (usually 0) with a reason; None abstains. An exception, a non-finite
    value, a crash or a missed deadline is the scorer's fault and makes the reward absent.
    """

    scope: ClassVar[Scope]

    def score(self, sample: Any) -> Any:
        """Scores one `Sample` (scope "sample"), or a list of them; may be `async`."""
        ...


class Reward(Plugin):
    """Base of rewards with options; subclasses implement `score`.

    Attributes:
        scope: "sample": `score(sample)` sees one turn. "siblings": `score(samples)` sees all turns
            that continue the same parent. "group": all turns of that kind for one prompt. The
            wider two return one verdict per sample, in order.
        reads_parent: True if the reward requires `of:` in YAML.
        concurrency: how many calls run at a time in one worker process, for rewards that wait
            for something else, such as a server. `async def score` runs on one thread, `def
            score` on one for each call. Each call has its own deadline.
        max_cost: a run that has recalled answers (`rlx.plugin.recall`) whose `cost` sums up to
            this much ends after the step, with a checkpoint; None for no limit.
    """

    scope: ClassVar[Scope] = "sample"
    reads_parent: ClassVar[bool] = False
    concurrency: ClassVar[int] = 1
    max_cost: ClassVar[float | None] = None
    examples: ClassVar[tuple[Example, ...]] = ()

    def check_problem(self, problem: Mapping[str, Any]) -> None:
        """Raises ValueError if a problem lacks what the reward compares with, such as an answer."""

    def spans_read(self) -> Sequence[str]:
        """Names of the spans without which it pays nothing, required of its turn."""
        return ()

    def value_range(self) -> tuple[float, float] | None:
        """Least and greatest value of a score; None if nothing is promised."""
        return None


@overload
def reward(function: Callable[..., Any]) -> type[Reward]: ...
@overload
def reward(
    *,
    scope: Scope = "sample",
    reads_parent: bool = False,
    concurrency: int = 1,
    examples: Sequence[Example] = (),
    api: int = API,
) -> Callable[[Callable[..., Any]], type[Reward]]: ...
def reward(
    function: Callable[..., Any] | None = None,
    *,
    scope: Scope = "sample",
    reads_parent: bool = False,
    concurrency: int = 1,
    examples: Sequence[Example] = (),
    api: int = API,
) -> type[Reward] | Callable[[Callable[..., Any]], type[Reward]]:
    """Makes a reward plugin from a plain function: `f(sample, *, option: type = default)`.

    Its keyword-only parameters become the plugin's options. They need annotations;
    `Annotated[int, Field(ge=1, description="...")]` adds bounds and a help text.

    Raises:
        TypeError: the signature is not one positional parameter plus annotated keyword-only ones.

    Example:
        >>> @reward
        ... def shortness(sample, *, limit: int = 100):
        ...     '''1 when the response is no longer than `limit` characters.'''
        ...     return float(len(sample.response) <= limit)
        >>> sample = Sample(id="a", problem={}, turn="answer", number=1, response="hi")
        >>> shortness(limit=5).score(sample)
        1.0
    """

    def build_reward_class(f: Callable[..., Any]) -> type[Reward]:
        first, *options = inspect.signature(f).parameters.values()
        if first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
            raise TypeError(f"{f.__name__}: the first parameter must take the sample")
        hints = get_type_hints(f, include_extras=True)
        fields: dict[str, Any] = {}
        for option in options:
            if option.kind is not option.KEYWORD_ONLY or option.name not in hints:
                problem = f"option {option.name!r} must be keyword-only and typed"
                raise TypeError(f"{f.__name__}: {problem}")
            default = ... if option.default is option.empty else option.default
            fields[option.name] = (hints[option.name], default)

        def score(self: Reward, sample: Any) -> Any:
            return f(sample, **{name: getattr(self, name) for name in fields})

        attributes = {
            "__module__": f.__module__,
            "__annotations__": {},
            "scope": scope,
            "reads_parent": reads_parent,
            "concurrency": concurrency,
            "examples": tuple(examples),
            "api": api,
            "score": score,
        }
        base = type(f"{f.__name__}_base", (Reward,), attributes)
        model: Any = create_model(f.__name__, __base__=base, __module__=f.__module__, **fields)
        model.__doc__ = f.__doc__
        model.__qualname__ = f.__qualname__
        type.__setattr__(model, "reward_function", staticmethod(f))  # its source is the class's
        return cast(type[Reward], model)

    return build_reward_class if function is None else build_reward_class(function)
