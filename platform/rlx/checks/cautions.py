"""Warnings about settings that are valid but probably unintended, independent of plugins."""

from collections.abc import Iterator
from typing import Any

from rlx.spec import ExperimentSpec
from rlx.spec.reading import Diagnostic, build_warning, suggest_name

__all__ = ["find_cautions"]


def find_cautions(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields warnings about the experiment as it stands in phases without `set`."""
    plain = [phase for phase in spec.phases if not phase.set]
    warmup = spec.optimizer.warmup_steps
    for phase in plain:
        if warmup >= phase.steps:
            yield build_warning(
                ("optimizer", "warmup_steps"),
                f"optimizer.warmup_steps is {warmup}, but phase '{phase.name}' ends after "
                f"{phase.steps} steps: the learning rate never leaves its warm-up",
            )
    critic = spec.critic
    if critic is not None and critic.lead_steps >= spec.steps:
        yield build_warning(
            ("critic", "lead_steps"),
            f"critic.lead_steps is {critic.lead_steps}, and the run takes {spec.steps} steps: the "
            "policy never learns",
        )
    if critic is not None and critic.warmup_steps >= spec.steps:
        yield build_warning(
            ("critic", "warmup_steps"),
            f"critic.warmup_steps is {critic.warmup_steps}, and the run takes {spec.steps} steps: "
            "the critic's learning rate never leaves its warm-up",
        )
    warm = spec.model.warm_start
    if warm is not None and warm.warmup_steps >= warm.steps:
        yield build_warning(
            ("model", "warm_start", "warmup_steps"),
            f"model.warm_start.warmup_steps is {warm.warmup_steps}, but the warm start ends after "
            f"{warm.steps} steps: the learning rate never leaves its warm-up",
            against=("model", "warm_start", "steps"),
        )
    yield from _check_replaced_sections(spec)
    if plain:
        yield from _check_turn_sampling(spec)
        yield from _check_kl_settings(spec)
        yield from _check_optimizer_steps(spec)
        yield from _check_probe_close(spec)


def _check_replaced_sections(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    """Yields mappings in a phase's `set` that put values of the experiment back to defaults."""
    before = spec.dump_resolved()
    for number, phase in enumerate(spec.phases):
        if not any(isinstance(value, dict) for value in phase.set.values()):
            continue
        try:
            after = spec.resolve_phase_spec(phase).dump_resolved()
        except ValueError:  # an error says so
            continue
        for key, written in phase.set.items():
            old, new = _find_section(before, key), _find_section(after, key)
            if not (isinstance(written, dict) and old and new):
                continue
            apart = {
                other.split(".")[key.count(".") + 1]
                for other in phase.set
                if other.startswith(f"{key}.")
            }
            kept = old.keys() & new.keys() - written.keys() - apart
            if lost := [name for name in kept if old[name] != new[name]]:
                yield build_warning(
                    ("phases", number, "set", key),
                    f"{key!r} replaces the whole section, so {', '.join(sorted(lost))} of it "
                    f"{'has its default' if len(lost) == 1 else 'have their defaults'} "
                    f"(phase '{phase.name}')",
                    f"to keep the others, set single values: {key}.{next(iter(written), 'KEY')}",
                )


def _find_section(tree: Any, key: str) -> dict[str, Any] | None:
    for step in key.split("."):
        tree = tree.get(step) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


def _check_kl_settings(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    credit, penalty = spec.credit, spec.loss.kl
    if not credit.use_kl_in_reward:
        for key in ("kl_penalty", "kl_coef", "kl_adaptive"):
            if getattr(credit, key) != type(credit).model_fields[key].default:
                yield build_warning(
                    ("credit", key),
                    f"credit.{key} has no effect: KL is not part of the reward",
                    "set `credit.use_kl_in_reward: true` to include it",
                )
    elif credit.kl_coef == 0:
        yield build_warning(
            ("credit", "kl_coef"),
            "credit.kl_coef is 0, so KL does not affect the reward"
            + (": β is adapted by multiplication and stays 0" if credit.kl_adaptive else ""),
        )
    if penalty is not None and penalty.kl_penalty in ("k1", "kl"):
        yield build_warning(
            ("loss", "kl", "kl_penalty"),
            f"loss.kl.kl_penalty is {penalty.kl_penalty!r}: as a loss, its gradient is 0 in "
            "expectation",
            "k2 has the gradient of the KL; k1 belongs in the reward",
        )


def _check_optimizer_steps(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    parts, prompts = spec.optimizer.mini_batches, spec.rollout.prompts_per_step
    if parts < prompts and prompts % parts:
        yield build_warning(
            ("optimizer", "mini_batches"),
            f"optimizer.mini_batches {parts} does not divide rollout.prompts_per_step {prompts}: "
            f"parts of {prompts // parts + 1} and of {prompts // parts} prompts count the same",
            against=("rollout", "prompts_per_step"),
        )
    for name in ("updates_per_rollout", "mini_batches"):
        count = getattr(spec.optimizer, name)
        if spec.loss.surrogate == "none" and count > 1:
            yield build_warning(
                ("loss", "surrogate"),
                f"loss.surrogate is 'none', and optimizer.{name} is {count}: nothing bounds the "
                "ratio after the first update",
                against=("optimizer", name),
            )


def _check_turn_sampling(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    for number, level in enumerate(spec.rollout.list_levels()):
        for key, full in (("top_p", 1.0), ("top_k", 0)):
            if getattr(level.turn, key) != full:
                yield build_warning(
                    ("rollout", *level.at, key),
                    f"{level.key}.{key} is {getattr(level.turn, key)}: the learner's "
                    "log-probabilities are of the full distribution, so ratios and KL are not "
                    "exact",
                    f"{key}: {full} samples from the full distribution",
                )
        if number == 0 and "{prompt}" not in level.turn.template:
            yield build_warning(
                ("rollout", *level.at, "template"),
                f"{level.key}.template has no {{prompt}}: the model never sees the problem",
            )


def _check_probe_close(spec: ExperimentSpec) -> Iterator[Diagnostic]:
    if spec.probe is None:
        return
    first, *_ = spec.rollout.list_levels()
    spans, name = first.turn.spans, spec.probe.close.strip("</>")
    if name not in spans:
        yield build_warning(
            ("probe", "close"),
            f"probe.close ends a span {name!r}, but {first.key}.spans has "
            f"{', '.join(spans) or 'none'}: rewards may look for the answer elsewhere",
            suggest_name(spec.probe.close, (f"</{span}>" for span in spans)),
        )
