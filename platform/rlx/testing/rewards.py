"""Checks for rewards, which run as in training: in a worker with a deadline and a memory cap."""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import SkipTest

from rlx.plugin import Example, Plugin, Sample, Score
from rlx.reward import JobOutcome, RewardJob
from rlx.spec import TurnReward
from rlx.testing.promise import (
    PromiseCheck,
    Promises,
    Subject,
    build_first_plugin,
    build_subject_plugin,
    open_worker,
    run_checks,
    shorten_text,
)

DEADLINE: float = TurnReward.model_fields["deadline"].default

HOSTILE_TEXTS = {
    "empty text": "",
    "white space": " \t\r\n\u2028\u00a0",
    "NUL": "<answer>\0</answer>\0",
    "terminal escapes": "\x1b[2J\x1b]0;owned\x07<answer>\x1b[31m1\x1b[0m</answer>",
    "unicode": "<answer>١²³ π 🙂 \u202e321\u202c e\u0301 ﷽</answer>",
    "numbers that are none": "<answer>nan</answer><confidence>-inf</confidence> 1e999 9**9**9**9",
    "unclosed tags": "<answer>" * 20_000,
    "nested tags": "<think>" * 5_000 + "</answer></think>" * 5_000,
    "nested brackets": "<answer>" + "(" * 20_000 + "1" + ")" * 20_000 + "</answer>",
    "100 kB of words": "<answer>" + "so it is, 1 + 1 = 2; " * 5_000 + "</answer>",
    "100 kB of digits": "<answer>" + "7" * 100_000 + "</answer>",
}
"""Responses that a policy may write and that no reward may fail on."""

_ORDINARY = ("42", "<think>6*7=42</think><answer>6*7</answer>", "<confidence>0.5</confidence>", "?")
_promise = Promises()


def check_reward(reward: Subject, samples: Sequence[Sample] | None = None) -> None:
    """Raises AssertionError, naming the broken promise, unless a reward keeps them all.

    Args:
        reward: a class, checked with the options of each of its examples, or an instance.
        samples: replace those of its examples; in wider scopes than "sample" they form one group.
    """
    run_checks(reward_checks(samples), reward)


def reward_checks(samples: Sequence[Sample] | None = None) -> tuple[PromiseCheck, ...]:
    """The checks for rewards; see `check_reward`."""
    own = None if samples is None else tuple(samples)

    def call(run: Callable[[Subject, list[_RewardCase]], None], subject: Subject) -> None:
        run(subject, _build_reward_cases(subject, own))

    return _promise.build_checks(call)


@dataclass(frozen=True, slots=True)
class _RewardCase:
    """One call of a reward; `is_made_up` if its samples are no author's."""

    reward: Any
    samples: tuple[Sample, ...]
    is_made_up: bool = False

    def __str__(self) -> str:
        return f"on {shorten_text(' '.join(repr(s.response) for s in self.samples))}"

    def with_responses(self, *texts: str, spans: bool = True) -> "_RewardCase":
        """The same case with other responses, in turn; also inside the spans, or without spans."""
        samples = tuple(
            replace(
                sample,
                response=texts[i % len(texts)],
                spans=dict.fromkeys(sample.spans, texts[i % len(texts)]) if spans else {},
            )
            for i, sample in enumerate(self.samples)
        )
        return _RewardCase(self.reward, samples)


def _build_reward_cases(
    subject: Subject, own_samples: tuple[Sample, ...] | None
) -> list[_RewardCase]:
    """The samples to try, with every set of options that the examples use."""
    examples = () if own_samples is not None else _list_examples(subject)
    pairs: list[tuple[Any, tuple[Sample, ...]]] = [
        (
            subject if isinstance(subject, Plugin) else build_subject_plugin(subject, e.options),
            (e.sample,) if isinstance(e.sample, Sample) else e.sample,
        )
        for e in examples
    ]
    if not pairs:
        reward = build_first_plugin(subject)
        of = 1.0 if getattr(reward, "reads_parent", False) else None
        ordinary = (
            Sample(id=f"{i}", problem={}, turn="answer", number=1, response=text, of=of)
            for i, text in enumerate(_ORDINARY)
        )
        pairs = [(reward, tuple(ordinary) if own_samples is None else own_samples)]
    is_made_up = own_samples is None and not examples
    return [
        _RewardCase(reward, together, is_made_up)
        for reward, samples in pairs
        for together in ([(s,) for s in samples] if reward.scope == "sample" else [samples])
    ]


def _list_examples(subject: Subject) -> tuple[Example, ...]:
    return tuple(getattr(subject, "examples", ()))


def _run_cases(cases: Sequence[_RewardCase], *, fresh: bool = False) -> list[JobOutcome]:
    with open_worker(fresh=fresh) as pool:
        return pool.score([RewardJob(c.reward, c.samples, DEADLINE) for c in cases])


def _get_verdicts(
    cases: Sequence[_RewardCase], names: Iterable[str] | None = None, *, fresh: bool = False
) -> list[tuple[Score | None, ...]]:
    """The verdicts on each case; an AssertionError names the first on which the reward failed."""
    outcomes = _run_cases(cases, fresh=fresh)
    for name, outcome in zip(names or map(str, cases), outcomes, strict=False):
        assert outcome.fault is None, f"{name}: {outcome.fault}"
    return [outcome.verdicts for outcome in outcomes]


@_promise(
    "returns a number or abstains",
    "return a finite number, a Score or None; in wider scopes a list, one per sample; define the "
    "plugin at the top of a module, and keep only plain values in it",
)
def _check_score_values(_: Subject, cases: list[_RewardCase]) -> None:
    for case, outcome in zip(cases, _run_cases(cases), strict=True):
        hint = "; if it reads something of the problem, give it examples" if case.is_made_up else ""
        assert outcome.fault is None, f"{case}: {outcome.fault}{hint}"


@_promise("matches its examples", "the reward is wrong, or the example is")
def _check_reward_examples(subject: Subject, _: list[_RewardCase]) -> None:
    examples = _list_examples(subject)
    if not examples:
        raise SkipTest("it has none; give it at least a gold, a wrong and a hostile one")
    names = [e.name for e in examples]
    assert len(set(names)) == len(names), f"two examples have one name: {sorted(names)}"
    cases = [
        _RewardCase(
            build_subject_plugin(subject, e.options),
            (e.sample,) if isinstance(e.sample, Sample) else e.sample,
        )
        for e in examples
    ]
    found = _get_verdicts(cases, [f"'{name}'" for name in names])
    for example, verdicts in zip(examples, found, strict=True):
        wanted = example.value if isinstance(example.value, tuple) else (example.value,)
        values = _get_values(verdicts)
        actual, expected = _format_score_values(values), _format_score_values(wanted)
        message = f"'{example.name}' gives {actual}, not {expected}"
        assert len(values) == len(wanted) and all(map(_is_close_value, values, wanted)), message
        if example.reason is not None:
            reason = None if verdicts[0] is None else verdicts[0].reason
            message = f"'{example.name}' gives the reason {reason!r}, not {example.reason!r}"
            assert reason == example.reason, message


def _format_score_values(values: Sequence[float | None]) -> str:
    return ", ".join("nothing" if v is None else f"{v:.6g}" for v in values)


@_promise(
    "repeats its verdicts",
    "depend on the sample and the options alone: no clock, no random numbers, no state, no order "
    "of a set",
)
def _check_reward_determinism(_: Subject, cases: list[_RewardCase]) -> None:
    first = _get_verdicts(cases)
    for what, fresh in (("the second time", False), ("in another process", True)):
        for case, one, other in zip(cases, first, _get_verdicts(cases, fresh=fresh), strict=True):
            assert one == other, f"{case}: a different verdict {what}"


@_promise(
    "tolerates hostile text",
    "what a model writes is never an error: give it a score and a reason, in linear time",
)
def _check_hostile_responses(_: Subject, cases: list[_RewardCase]) -> None:
    distinct = {(c.reward.model_dump_json(), len(c.samples)): c for c in reversed(cases)}
    for case in distinct.values():
        calm = case.samples[0].response
        for label, text in HOSTILE_TEXTS.items():
            hostile = [case.with_responses(text), case.with_responses(text, spans=False)]
            if len(case.samples) > 1:
                hostile.append(case.with_responses(calm, text))
            _get_verdicts(hostile, [label] * len(hostile))


@_promise(
    "ignores the order of samples", "a sample's verdict must not depend on its place in the list"
)
def _check_sample_order(_: Subject, cases: list[_RewardCase]) -> None:
    groups, orders, moved = [], [], []
    for case in _require_wider_scope(cases):
        if len(case.samples) == 1:
            several = (replace(case.samples[0], id=f"a/{i}") for i in range(len(_ORDINARY)))
            case = _RewardCase(case.reward, tuple(several)).with_responses(*_ORDINARY)
        order = list(range(len(case.samples)))
        rng = random.Random(len(order))
        while order == sorted(order):
            rng.shuffle(order)
        groups.append(case)
        orders.append(order)
        moved.append(_RewardCase(case.reward, tuple(case.samples[i] for i in order)))
    others = _get_verdicts(moved, [f"{case}, in another order" for case in groups])
    for case, order, expected, actual in zip(
        groups, orders, _get_verdicts(groups), others, strict=True
    ):
        given, moved_to = _get_values(expected), _get_values(actual)
        same = all(_is_close_value(moved_to[i], given[j]) for i, j in enumerate(order))
        assert same, f"{case}: different verdicts in another order"


@_promise("accepts a single sample", "a group may hold one sample")
def _check_single_sample(_: Subject, cases: list[_RewardCase]) -> None:
    alone = [
        _RewardCase(case.reward, (s,)) for case in _require_wider_scope(cases) for s in case.samples
    ]
    _get_verdicts(alone, [f"{case} alone" for case in alone])


@_promise(
    "keeps within its value_range",
    "return the least and the greatest value that a score can have, or None",
)
def _check_value_range(_: Subject, cases: list[_RewardCase]) -> None:
    tried = [
        one
        for case in cases
        if case.reward.value_range() is not None
        for one in (case, *map(case.with_responses, HOSTILE_TEXTS.values()))
    ]
    if not tried:
        raise SkipTest("it promises no range")
    for case, verdicts in zip(tried, _get_verdicts(tried), strict=True):
        low, high = case.reward.value_range()
        for score in verdicts:
            assert score is None or low <= score.value <= high, (
                f"{case}: {score.value:.6g} is outside [{low:.6g}, {high:.6g}]"
            )


def _require_wider_scope(cases: list[_RewardCase]) -> list[_RewardCase]:
    if cases[0].reward.scope == "sample":
        raise SkipTest("it looks at one sample at a time")
    return cases


def _get_values(verdicts: Sequence[Score | None]) -> tuple[float | None, ...]:
    return tuple(None if verdict is None else verdict.value for verdict in verdicts)


def _is_close_value(one: float | None, other: float | None) -> bool:
    """Equal up to the rounding of a reordered sum."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
