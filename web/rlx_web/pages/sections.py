"""Assigns a run's metrics to the sections and charts of its page."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves in one chart.

    Attributes:
        title: the chart's title.
        curves: pairs of metric name and legend label.
    """

    title: str
    curves: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under one heading."""

    title: str
    charts: tuple[Chart, ...]


PLAN: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    (
        "Reward",
        (
            ("by component", r"rewards/(.+)/mean"),
            ("share without a score", r"rewards/(.+)/absent"),
            ("by player", r"players/(.+)"),
            ("by turn", r"train/reward_?(?!.*_std$)(.*)"),
            ("σ by turn", r"train/reward_?(.*)_std"),
            ("parts of scores", r"parts/(.+)"),
            (
                "score",
                r"score/(total_score|token_level_scores|masked_return_sum|seed_returns_score)",
            ),
        ),
    ),
    (
        "Length and truncation",
        (
            ("tokens", r"rollout/len_(?!.*_std$)(.+)"),
            ("σ of tokens", r"rollout/len_(.+)_std"),
            ("share truncated", r"rollout/truncated_(.+)"),
            ("turns", r"rollout/turns?_?(.*)"),
            ("without a span, dropped", r"rollout/(no_span|dropped)"),
        ),
    ),
    (
        "Groups without signal",
        (
            ("share of groups", r"rollout/zero_signal_(.+)"),
            ("filtered", r"rollout/(filtered|kept|resampled)"),
            ("problems too long", r"prompts/(dropped|truncated)"),
            ("mean |advantage|", r"train/advantage_abs_(.+)"),
        ),
    ),
    (
        "Policy",
        (
            ("entropy, nats", r"train/(entropy|span_entropy)"),
            ("KL, nats", r"(?:train|kl)/(kl.*|beta)"),
            ("clipping", r"train/(clip_frac.*|ratio_max)"),
            ("gradient norm", r"train/(grad_norm)"),
            ("loss", r"train/(loss|value_loss)"),
            ("stated confidences: expected score, mass", r"train/(expected_score|stated_mass)"),
            ("learning rate", r"train/(lr.*)"),
        ),
    ),
    (
        "Calibration",
        (
            ("held out: accuracy", r"eval/(.+)/accuracy"),
            ("held out: Brier", r"eval/(.+)/brier"),
            ("held out: ECE", r"eval/(.+)/ece"),
            ("held out: AUROC", r"eval/(.+)/auroc"),
            ("batch: Brier", r"calibration/(brier)"),
            ("batch: confidence and gap", r"calibration/(conf_mean|gap)"),
            ("batch: correlation, spread", r"calibration/(corr|conf_spread|alike_share)"),
        ),
    ),
    (
        "Speed",
        (
            ("CPU seconds of a step, by part", r"perf/cpu_(.+)_s"),
            ("seconds of a step", r"perf/(.+)_s"),
            ("tokens per second", r"perf/(tokens_per_s)"),
            ("shared prefixes", r"perf/(shared_prefix_ratio)"),
            ("GiB of the GPU at the peak", r"perf/memory_(.+)_gib"),
        ),
    ),
    (
        "Sampler and health",
        (
            ("sampler against learner", r"sampler/(.+)"),
            ("health", r"health/(.+)"),
        ),
    ),
    ("Warm start", (("loss of the demonstrations, nats per token", r"warm_start/(loss)"),)),
)


def build_metric_sections(names: Iterable[str]) -> list[Section]:
    """Assigns every metric to the first chart whose pattern it matches, the rest by prefix."""
    left = dict.fromkeys(names)
    found: list[Section] = []
    for title, charts in PLAN:
        drawn = [
            chart for what, pattern in charts if (chart := _build_metric_chart(what, pattern, left))
        ]
        if drawn:
            found.append(Section(title, tuple(drawn)))
    others: dict[str, list[str]] = {}
    for name in left:
        others.setdefault(name.rpartition("/")[0] or "other", []).append(name)
    alone = [
        Chart(prefix, tuple((name, name.rpartition("/")[2] or name) for name in some))
        for prefix, some in sorted(others.items())
    ]
    return [*found, Section("Other metrics", tuple(alone))] if alone else found


def _build_metric_chart(title: str, pattern: str, left: dict[str, None]) -> Chart | None:
    """Moves the metrics that match `pattern` from `left` into a chart."""
    fits = {name: match for name in left if (match := re.fullmatch(pattern, name, re.DOTALL))}
    if title == "seconds of a step":
        fits.pop("perf/tokens_per_s", None)
    for name in fits:
        del left[name]
    curves = tuple((name, match[1] or name.rpartition("/")[2]) for name, match in fits.items())
    return Chart(title, curves) if curves else None
