"""Contradictions between the loss and the turns, the rewards and its own settings."""

from collections.abc import Iterator

from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec
from rlx.spec.reading import Diagnostic, build_error, suggest_name

__all__ = ["find_loss_contradictions"]


def find_loss_contradictions(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields contradictions between `loss` and the other sections."""
    yield from _check_entropy_bonus(spec)
    yield from _check_expected_score(spec)
    yield from _check_loss_settings(spec)


def _check_entropy_bonus(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    bonus = spec.loss.entropy
    spans = [s for turn in spec.rollout.turn_specs.values() for s in turn.spans]
    if bonus is not None and bonus.span is not None and bonus.span not in spans:
        message = (
            f"loss.entropy.span is {bonus.span!r}, but the turns declare "
            f"{', '.join(spans) or 'no spans'}"
        )
        yield build_error(("loss", "entropy", "span"), message, suggest_name(bonus.span, spans))


def _check_expected_score(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    expected = spec.loss.expected
    if expected is None:
        return
    if isinstance(spec.rollout, EnvironmentRolloutSpec):
        yield build_error(
            ("loss", "expected"),
            "loss.expected needs one confidence and one label per row: schedule "
            f"{spec.rollout.schedule!r} has several turns in a row",
            "drop `loss.expected`, or choose another schedule",
            against=("rollout", "schedule"),
        )
        return
    turns, rewards = spec.rollout.turn_specs, spec.rewards.turn
    spans = [s for turn in turns.values() for s in turn.spans]
    if expected.span not in spans:
        message = (
            f"loss.expected.span is {expected.span!r}, but the turns declare "
            f"{', '.join(spans) or 'no spans'}"
        )
        help_ = suggest_name(expected.span, spans)
        yield build_error(("loss", "expected", "span"), message, help_)
        return
    label = rewards.get(expected.of)
    if label is None:
        message = (
            f"loss.expected.of is {expected.of!r}, which is not a turn reward; there are: "
            f"{', '.join(rewards) or 'none'}"
        )
        yield build_error(("loss", "expected", "of"), message, suggest_name(expected.of, rewards))
        return
    order = list(turns)
    states = max(order.index(name) for name, turn in turns.items() if expected.span in turn.spans)
    if label.turn in order and order.index(label.turn) > states:
        message = (
            f"loss.expected.of is {expected.of!r}, which scores {label.turn} turns, after the "
            f"{order[states]} that states the {expected.span}"
        )
        help_ = (
            "what would have been answered after another value is unknown: drop `loss.expected`, "
            "and sample several confidences"
        )
        yield build_error(("loss", "expected", "of"), message, help_)


def _check_loss_settings(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    loss = spec.loss
    if loss.kl is not None and spec.credit.use_kl_in_reward:
        yield build_error(
            ("loss", "kl"),
            "loss.kl and credit.use_kl_in_reward are both on: KL would be penalized twice",
            "keep one of them: KL as a penalty in the loss, or as part of the reward",
            against=("credit", "use_kl_in_reward"),
        )
    if loss.correction is not None and loss.old_logprobs != "learner":
        yield build_error(
            ("loss", "correction"),
            "loss.correction weighs the learner's old log-probabilities against the sampler's, but "
            f"loss.old_logprobs is {loss.old_logprobs!r}: they would be identical",
            "`old_logprobs: learner` computes them",
            against=("loss", "old_logprobs"),
        )
    if loss.surrogate in ("dppo_tv", "dppo_kl") and loss.ratio != "token":
        yield build_error(
            ("loss", "ratio"),
            f"loss.ratio is {loss.ratio!r}, but loss.surrogate {loss.surrogate!r} compares the "
            "probabilities of single tokens",
            "use `ratio: token`, or another surrogate",
            against=("loss", "surrogate"),
        )
    if loss.constant_length is not None and loss.aggregate != "constant":
        yield build_error(
            ("loss", "constant_length"),
            f"loss.constant_length is {loss.constant_length}, but loss.aggregate "
            f"{loss.aggregate!r} does not divide by a constant",
            "use `aggregate: constant`, or drop `constant_length`",
            against=("loss", "aggregate"),
        )
