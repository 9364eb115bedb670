"""All that a plugin author imports. Neither torch nor anything else heavy comes with it.

A plugin is a frozen Pydantic model: its fields are its options in YAML, its first docstring line
is what `rlx plugins` prints. A distribution offers it under an entry-point group:

    rlx.tasks        Task        where problems come from
    rlx.rewards      Reward      what a turn is worth
    rlx.estimators   Estimator   how rewards become advantages
    rlx.masks        Mask        which tokens learn

The plugins that rlx ships enter the same way.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    cast,
    get_type_hints,
    overload,
    runtime_checkable,
)

from pydantic import BaseModel, ConfigDict, PrivateAttr, create_model

__all__ = [
    "API",
    "Canonical",
    "Corrupts",
    "Demonstration",
    "Estimator",
    "Example",
    "Mask",
    "Plugin",
    "Problem",
    "Reading",
    "Reward",
    "RewardPlugin",
    "Sample",
    "Score",
    "Split",
    "Task",
    "Use",
    "reward",
]

API = 1
"""Version of everything in this module. A plugin that needs a newer one is refused by name."""

Split = Literal["train", "test"]


class Plugin(BaseModel):
    """A named piece of an experiment; its fields are the options that YAML may give it."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    api: ClassVar[int] = API
    needs: ClassVar[frozenset[str]] = frozenset()
    """Streams this plugin reads beyond the usual, such as `values` or `reference_logprobs`."""
    nested: ClassVar[Mapping[str, str]] = {}
    """Options of type `Mapping[str, Use]` and the kind of plugin they hold, such as
    `{"sources": "reward"}`; `inner` gives those plugins, made and checked."""

    _inner: dict[str, Mapping[str, "Plugin"]] = PrivateAttr(default_factory=dict)

    def inner(self, option: str) -> Mapping[str, Any]:
        """The plugins that a nested option names, by their keys."""
        return self._inner[option]

    def with_inner(self, plugins: Mapping[str, Mapping[str, "Plugin"]]) -> Self:
        """Returns the same plugin, holding those that its nested options name."""
        holder = self.model_copy()
        holder._inner = dict(plugins)
        return holder

    def check(self) -> None:
        """Looks whether all that this plugin reads is there and in order, such as its data files.

        `rlx submit` calls it before anything is recorded. By default it looks at the plugins that
        nested options name; plugins with files or packages of their own override it.

        Raises:
            OSError, ImportError: this machine lacks a file or a package.
            ValueError: what is there is not what the options say.
        """
        for plugins in self._inner.values():
            for plugin in plugins.values():
                plugin.check()


class Use(BaseModel):
    """A plugin named among another's options; the keys beside `plugin` are its own options."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)

    plugin: str


# Tasks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to ask, with all that is needed to score an answer.

    Attributes:
        id: the same for the same problem in every run, so that two runs can be compared on it.
        prompt: the text to show to the model.
        system: a system message; "" leaves it to the experiment.
        fields: the task's record (ground truth, `data_source`, ...), plain JSON values.
        stratum: a coarse label of difficulty known before any answer; "" where there is none.
            Calibration figures are also given within each stratum.
    """

    id: str
    prompt: str
    fields: Mapping[str, Any]
    stratum: str = ""
    system: str = ""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A worked episode for warm starts: the texts of the turns, in order, without their prompts."""

    turns: tuple[str, ...]


@runtime_checkable
class Task(Protocol):
    """A source of problems. `problem` is a pure function: a cursor is all that resuming needs.

    A task that reads files overrides `Plugin.check`, so that a bad file stops `rlx submit`.
    """

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index` (from 0) of a split. Train and test share no problem."""
        ...

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns a worked solution, good or poor, for supervised warm starts.

        Raises:
            NotImplementedError: the task has none. It says so beforehand by a class variable or
                property `demonstrates` that is False, so that `warm_start` is refused when read.
        """
        ...


@runtime_checkable
class Corrupts(Protocol):
    """A task that can spoil a sentence of reasoning; probes of the scheme `mistake` ask for it."""

    def corruption(self, sentence: str, seed: int) -> str | None:
        """Returns the sentence with one thing made wrong; None where it has nothing to spoil."""
        ...


@runtime_checkable
class Canonical(Protocol):
    """A task whose answers can be written in several ways."""

    def canonical(self, answer: str) -> str:
        """Returns a text that is the same for answers that say the same."""
        ...


# Rewards ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn of one rollout, as a reward sees it. Text is the model's own and untrusted.

    A reward of whole rollouts is shown a rollout's last turn, with the earlier ones as context.

    Attributes:
        id: unique within the step.
        problem: the task's record, `Problem.fields`.
        turn: what the turn is: "answer", "confidence", ...
        number: position of the turn in its rollout, from 1.
        response: text of this turn alone, never of the prompt.
        spans: text inside each named span that was found, such as `{"answer": "3 + 4"}`.
        n_tokens: tokens that the policy wrote in this turn.
        context: text of the earlier turns, in order; empty for the first turn.
        observations: text of what an environment wrote before this turn, in order.
        finish_reason: "stop", or "length" when the token budget ran out.
        info: what the environment reported for this turn.
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
    of: float | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """A reward's verdict.

    Attributes:
        value: finite number.
        reason: why it is what it is, where that needs saying ("unparsable", "format").
        parts: named figures worth keeping beside the value; never summed.
    """

    value: float
    reason: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


Scope = Literal["sample", "siblings", "group"]
Verdict = Score | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A case of a reward's own and the verdict that its author promises: gold, wrong or hostile.

    `rlx plugins check` keeps the reward to it, and makes its own hostile inputs from the problem.

    Attributes:
        name: what it shows, such as "gold" or "no closing tag"; one reward's names differ.
        sample: one sample; for wider scopes all that are judged together, as a tuple.
        value: of the verdict, None where it abstains; for wider scopes a tuple, in order.
        reason: of the verdict; looked at in scope "sample" where given.
        options: of the plugin, as YAML would give them.
    """

    name: str
    sample: Sample | tuple[Sample, ...]
    value: float | tuple[float | None, ...] | None
    reason: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class RewardPlugin(Protocol):
    """What `rlx` calls. `Reward` and `@reward` both satisfy it.

    A model's fault is a score (usually 0) with its reason; None abstains; an exception, a value
    that is not finite, a crash or a missed deadline is the scorer's fault and becomes an absence.
    """

    scope: ClassVar[Scope]

    def score(self, sample: Any) -> Any:
        """Scores one `Sample` (scope "sample"), or a list of them, giving a list of verdicts."""
        ...


class Reward(Plugin):
    """Base of rewards with options; subclasses write `score`.

    Attributes:
        scope: "sample": `score(sample)` sees one turn. "siblings": `score(samples)` sees all turns
            that continue the same parent. "group": all turns of that kind for one prompt. The
            wider two return one verdict per sample, in order.
        reads_parent: True when the reward must be given `of:` in YAML.
        examples: what its author promises of it.
    """

    scope: ClassVar[Scope] = "sample"
    reads_parent: ClassVar[bool] = False
    examples: ClassVar[tuple[Example, ...]] = ()


@overload
def reward(function: Callable[..., Any]) -> type[Reward]: ...
@overload
def reward(
    *,
    scope: Scope = "sample",
    reads_parent: bool = False,
    examples: Sequence[Example] = (),
    api: int = API,
) -> Callable[[Callable[..., Any]], type[Reward]]: ...
def reward(
    function: Callable[..., Any] | None = None,
    *,
    scope: Scope = "sample",
    reads_parent: bool = False,
    examples: Sequence[Example] = (),
    api: int = API,
) -> type[Reward] | Callable[[Callable[..., Any]], type[Reward]]:
    """Makes a reward plugin of a plain function: `f(sample, *, option: type = default)`.

    The function's keyword-only parameters become the plugin's options; they need annotations, and
    `Annotated[int, Field(ge=1, description="...")]` gives one its bounds and its line of help.

    Raises:
        TypeError: the signature is not one positional parameter and annotated keyword-only ones.

    Example:
        >>> @reward
        ... def shortness(sample, *, limit: int = 100):
        ...     '''1 when the response is no longer than `limit` characters.'''
        ...     return float(len(sample.response) <= limit)
        >>> said = Sample(id="a", problem={}, turn="answer", number=1, response="hi")
        >>> shortness(limit=5).score(said)
        1.0
    """

    def wrap(f: Callable[..., Any]) -> type[Reward]:
        first, *options = inspect.signature(f).parameters.values()
        if first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
            raise TypeError(f"{f.__name__}: the first parameter takes the sample")
        hints = get_type_hints(f, include_extras=True)
        fields: dict[str, Any] = {}
        for option in options:
            if option.kind is not option.KEYWORD_ONLY or option.name not in hints:
                raise TypeError(f"{f.__name__}: option {option.name!r} must be keyword-only, typed")
            default = ... if option.default is option.empty else option.default
            fields[option.name] = (hints[option.name], default)

        def score(self: Reward, sample: Any) -> Any:
            return f(sample, **{name: getattr(self, name) for name in fields})

        base = type(
            f"{f.__name__}_base",
            (Reward,),
            {
                "__module__": f.__module__,
                "__annotations__": {},
                "scope": scope,
                "reads_parent": reads_parent,
                "examples": tuple(examples),
                "api": api,
                "score": score,
            },
        )
        model: Any = create_model(f.__name__, __base__=base, __module__=f.__module__, **fields)
        model.__doc__ = f.__doc__
        model.__qualname__ = f.__qualname__
        return cast(type[Reward], model)

    return wrap if function is None else wrap(function)


# Estimators and masks: descriptors that name their implementation, imported only by a run --------

Reading = Literal["scores", "turns", "token_rewards"]


class Estimator(Plugin):
    """Options of an advantage estimator. `implementation` is called as `f(inputs, **options)`.

    Attributes:
        implementation: "module:function"; takes `rlx.credit.CreditInputs`, returns `[B, T]` or a
            `rlx.credit.Credit`.
        reads: which rewards it looks at: "scores" (one number per row, of `total_scores`), "turns"
            (the named rewards themselves), or "token_rewards" (as placed, KL included).
    """

    implementation: ClassVar[str]
    reads: ClassVar[Reading] = "scores"

    def reading(self) -> Reading:
        """As `reads`, for an estimator whose options decide it."""
        return self.reads

    def compares(self, turn: str) -> bool:
        """Whether a turn of this kind learns nothing without siblings to be compared with."""
        return False

    def refuses_one(self, turn: str) -> bool:
        """Whether an experiment that samples one turn of this kind per group is an error."""
        return False

    def warnings(self) -> Sequence[str]:
        """Sentences to show when the YAML is read, each saying why."""
        return ()


class Mask(Plugin):
    """Options of a mask strategy. `implementation` is called as `f(batch, **options)`.

    Attributes:
        implementation: "module:function"; takes `rlx.batch.TokenBatch`, returns bool `[B, T]`.
        beyond_own: whether tokens that the policy did not write may learn.
    """

    implementation: ClassVar[str]
    beyond_own: ClassVar[bool] = False
