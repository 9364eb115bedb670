"""Checks for rewards. Plugin authors: call `check_reward`, or parametrise by `reward_checks`.

    @pytest.mark.parametrize("check", reward_checks(), ids=str)
    def test_keeps(check):
        check(my_reward)

Rewards run as in training: in a worker process with a deadline and a memory cap.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import SkipTest

from rlx.plugin import Example, Plugin, Sample, Score
from rlx.reward import JobOutcome, RewardJob
from rlx.spec import TurnReward
from rlx.testing.promise import (
    PromiseCheck,
    Subject,
    build_subject_plugin,
    common_checks,
    run_checks,
    score_jobs,
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


def check_reward(reward: Subject, samples: Sequence[Sample] | None = None) -> None:
    """Raises AssertionError, naming the broken promise, unless a reward keeps them all.

    Args:
        reward: a class, checked with the options of each of its examples, or an instance.
        samples: replace those of its examples; in wider scopes than "sample" they form one group.
    """
    run_checks(reward_checks(samples), reward)


def reward_checks(samples: Sequence[Sample] | None = None) -> tuple[PromiseCheck, ...]:
    """Returns the checks for rewards.

    Args:
        samples: see `check_reward`.
    """
    own_samples = None if samples is None else tuple(samples)
    own: tuple[tuple[str, str, Any], ...] = (
        (
            "can be sent to a worker",
            "define it at the top of a module, and keep only plain values in it",
            _travels_to_worker,
        ),
        (
            "returns a number or abstains",
            "return a finite number, a Score or None; in wider scopes a list, one per sample",
            _check_score_values,
        ),
        ("matches its examples", "the reward is wrong, or the example is", _check_reward_examples),
        (
            "repeats its verdicts",
            "depend on the sample and the options alone: no clock, no random numbers, no state, no "
            "order of a set",
            _check_reward_determinism,
        ),
        ("does not modify samples", "copy what you change", _check_samples_unchanged),
        (
            "tolerates hostile text",
            "what a model writes is never an error: give it a score and a reason, in linear time",
            _check_hostile_responses,
        ),
        (
            "ignores the order of samples",
            "a sample's verdict must not depend on its place in the list",
            _check_sample_order,
        ),
        ("accepts a single sample", "a group may hold one sample", _check_single_sample),
        (
            "keeps within its value_range",
            "return the least and the greatest value that a score can have, or None",
            _check_value_range,
        ),
    )
    return (
        *common_checks(_build_first_reward),
        *(
            PromiseCheck(name, help_, partial(run, own_samples=own_samples))
            for name, help_, run in own
        ),
    )


# Cases --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RewardCase:
    """One call of a reward."""

    reward: Any
    samples: tuple[Sample, ...]

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


_Given = tuple[Sample, ...] | None


def _build_reward_cases(subject: Subject, own_samples: _Given) -> list[_RewardCase]:
    """The samples to try, with every set of options that the examples use."""
    examples = _list_reward_examples(subject)
    if isinstance(subject, Plugin):
        pairs = [(subject, _build_sample_tuple(e.sample)) for e in examples]
    elif own_samples is None:
        pairs = [
            (build_subject_plugin(subject, e.options), _build_sample_tuple(e.sample))
            for e in examples
        ]
    else:
        pairs = []
    rewards = [r for r, _ in pairs] or [_build_first_reward(subject)]
    if own_samples is not None or not pairs:
        pairs = [
            (
                rewards[0],
                own_samples if own_samples is not None else _build_ordinary_samples(rewards[0]),
            )
        ]
    return [
        _RewardCase(r, samples) for r, sample in pairs for samples in _split_into_calls(r, sample)
    ]


def _split_into_calls(reward: Any, samples: tuple[Sample, ...]) -> list[tuple[Sample, ...]]:
    return [(s,) for s in samples] if reward.scope == "sample" else [samples]


def _list_reward_examples(subject: Subject) -> tuple[Example, ...]:
    return tuple(getattr(subject, "examples", ()))


def _build_first_reward(subject: Subject) -> Any:
    """The instance itself, or the class with the options of its first example."""
    examples = _list_reward_examples(subject)
    if isinstance(subject, Plugin) or not examples:
        return build_subject_plugin(subject)
    return build_subject_plugin(subject, examples[0].options)


def _build_sample_tuple(sample: Sample | tuple[Sample, ...]) -> tuple[Sample, ...]:
    return (sample,) if isinstance(sample, Sample) else sample


def _build_ordinary_samples(reward: Any) -> tuple[Sample, ...]:
    """Samples for a reward without examples."""
    of = 1.0 if getattr(reward, "reads_parent", False) else None
    return tuple(
        Sample(id=f"{i}", problem={}, turn="answer", number=1, response=text, of=of)
        for i, text in enumerate(_ORDINARY)
    )


def _score_cases(cases: Sequence[_RewardCase], *, fresh: bool = False) -> list[JobOutcome]:
    jobs = [RewardJob(case.reward, case.samples, DEADLINE) for case in cases]
    return score_jobs(jobs, fresh=fresh)


def _assert_no_fault(outcome: JobOutcome, what: str) -> JobOutcome:
    assert outcome.fault is None, f"{what}: {outcome.fault}"
    return outcome


def _describe_case(case: _RewardCase) -> str:
    text = " ".join(repr(s.response) for s in case.samples)
    return f"on {text if len(text) <= 60 else text[:59] + '…'}"


# Checks -------------------------------------------------------------------------------------------


def _travels_to_worker(subject: Subject, own_samples: _Given) -> None:
    cases = _build_reward_cases(subject, own_samples)
    for case, outcome in zip(cases, _score_cases(cases), strict=True):
        fault = outcome.fault or ""
        # Other faults are left to the later checks.
        assert not fault.startswith("cannot be"), f"{type(case.reward).__name__} {fault}"


def _check_score_values(subject: Subject, own_samples: _Given) -> None:
    cases = _build_reward_cases(subject, own_samples)
    for case, outcome in zip(cases, _score_cases(cases), strict=True):
        strange = not _list_reward_examples(subject) and own_samples is None
        hint = "; if it reads something of the problem, give it examples" if strange else ""
        assert outcome.fault is None, f"{_describe_case(case)}: {outcome.fault}{hint}"


def _check_reward_examples(subject: Subject, own_samples: _Given) -> None:
    examples = _list_reward_examples(subject)
    if not examples:
        raise SkipTest("it has none; give it at least a gold, a wrong and a hostile one")
    names = [e.name for e in examples]
    assert len(set(names)) == len(names), f"two examples have one name: {sorted(names)}"
    cases = [
        _RewardCase(build_subject_plugin(subject, e.options), _build_sample_tuple(e.sample))
        for e in examples
    ]
    for example, outcome in zip(examples, _score_cases(cases), strict=True):
        _assert_no_fault(outcome, f"'{example.name}'")
        wanted = example.value if isinstance(example.value, tuple) else (example.value,)
        values = tuple(None if v is None else v.value for v in outcome.verdicts)
        actual, expected = _format_score_values(values), _format_score_values(wanted)
        message = f"'{example.name}' gives {actual}, not {expected}"
        assert len(values) == len(wanted) and all(map(_is_close_value, values, wanted)), message
        (first, *_) = outcome.verdicts
        if example.reason is not None:
            reason = None if first is None else first.reason
            message = f"'{example.name}' gives the reason {reason!r}, not {example.reason!r}"
            assert reason == example.reason, message


def _format_score_values(values: Sequence[float | None]) -> str:
    return ", ".join("nothing" if v is None else f"{v:.6g}" for v in values)


def _check_reward_determinism(subject: Subject, own_samples: _Given) -> None:
    cases = _build_reward_cases(subject, own_samples)
    first, second, third = _score_cases(cases), _score_cases(cases), _score_cases(cases, fresh=True)
    for case, *outcomes in zip(cases, first, second, third, strict=True):
        verdicts = [_assert_no_fault(o, _describe_case(case)).verdicts for o in outcomes]
        assert verdicts[0] == verdicts[1], (
            f"{_describe_case(case)}: a different verdict the second time"
        )
        assert verdicts[0] == verdicts[2], (
            f"{_describe_case(case)}: a different verdict in another process"
        )


def _check_samples_unchanged(subject: Subject, own_samples: _Given) -> None:
    cases = _build_reward_cases(subject, own_samples)
    jobs = [RewardJob(case.reward, case.samples, DEADLINE, is_watched=True) for case in cases]
    for case, outcome in zip(cases, score_jobs(jobs), strict=True):
        changed = _assert_no_fault(outcome, _describe_case(case)).changed
        assert not changed, f"{_describe_case(case)}: it changed {', '.join(changed)}"


def _check_hostile_responses(subject: Subject, own_samples: _Given) -> None:
    for case in _select_distinct_cases(_build_reward_cases(subject, own_samples)):
        calm = case.samples[0].response
        for label, text in HOSTILE_TEXTS.items():
            hostile = [case.with_responses(text), case.with_responses(text, spans=False)]
            if len(case.samples) > 1:
                hostile.append(case.with_responses(calm, text))
            for outcome in _score_cases(hostile):
                _assert_no_fault(outcome, label)


def _select_distinct_cases(cases: Sequence[_RewardCase]) -> Iterator[_RewardCase]:
    """The first case for each set of options and each group size."""
    seen = set()
    for case in cases:
        key = (case.reward.model_dump_json(), len(case.samples))
        if key not in seen:
            seen.add(key)
            yield case


def _check_sample_order(subject: Subject, own_samples: _Given) -> None:
    cases = _build_wider_cases(subject, own_samples)
    groups = [case if len(case.samples) > 1 else _build_sample_group(case) for case in cases]
    orders = [_shuffle_order(len(case.samples)) for case in groups]
    moved = [
        _RewardCase(case.reward, tuple(case.samples[i] for i in order))
        for case, order in zip(groups, orders, strict=True)
    ]
    outcomes = zip(groups, orders, _score_cases(groups), _score_cases(moved), strict=True)
    for case, order, still, other in outcomes:
        expected = _assert_no_fault(still, _describe_case(case)).verdicts
        actual = _assert_no_fault(other, f"{_describe_case(case)}, in another order").verdicts
        same = all(_is_same_verdict(actual[i], expected[j]) for i, j in enumerate(order))
        assert same, f"{_describe_case(case)}: different verdicts in another order"


def _build_sample_group(case: _RewardCase) -> _RewardCase:
    """Builds a group of several samples from a single one."""
    (sample,) = case.samples
    several = tuple(replace(sample, id=f"{sample.id}/{i}") for i in range(len(_ORDINARY)))
    return _RewardCase(case.reward, several).with_responses(*_ORDINARY)


def _shuffle_order(count: int) -> list[int]:
    """A permutation that differs from the original order."""
    rng, order = random.Random(count), list(range(count))
    while order == sorted(order):
        rng.shuffle(order)
    return order


def _check_single_sample(subject: Subject, own_samples: _Given) -> None:
    cases = [
        _RewardCase(case.reward, (s,))
        for case in _build_wider_cases(subject, own_samples)
        for s in case.samples
    ]
    for case, outcome in zip(cases, _score_cases(cases), strict=True):
        _assert_no_fault(outcome, f"{_describe_case(case)} alone")


def _check_value_range(subject: Subject, own_samples: _Given) -> None:
    cases = [
        tried
        for case in _build_reward_cases(subject, own_samples)
        if case.reward.value_range() is not None
        for tried in (case, *map(case.with_responses, HOSTILE_TEXTS.values()))
    ]
    if not cases:
        raise SkipTest("it promises no range")
    for case, outcome in zip(cases, _score_cases(cases), strict=True):
        low, high = case.reward.value_range()
        for score in _assert_no_fault(outcome, _describe_case(case)).verdicts:
            assert score is None or low <= score.value <= high, (
                f"{_describe_case(case)}: {score.value:.6g} is outside [{low:.6g}, {high:.6g}]"
            )


def _build_wider_cases(subject: Subject, own_samples: _Given) -> list[_RewardCase]:
    cases = _build_reward_cases(subject, own_samples)
    if cases[0].reward.scope == "sample":
        raise SkipTest("it looks at one sample at a time")
    return cases


def _is_same_verdict(one: Score | None, other: Score | None) -> bool:
    if one is None or other is None:
        return one is other
    return _is_close_value(one.value, other.value)


def _is_close_value(one: float | None, other: float | None) -> bool:
    """Equal up to the rounding of a reordered sum."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
