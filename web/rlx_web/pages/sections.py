"""Assigns a run's metrics to the sections and charts of its page."""

import re
from collections.abc import Iterable
from typing import Any

CHARTS = (
    ("Reward", "by component", r"rewards/(.+)/mean"),
    ("Reward", "share without a score", r"rewards/(.+)/absent"),
    ("Reward", "by player", r"players/(.+)"),
    ("Reward", "by turn", r"train/reward_?(?!.*_std$)(.*)"),
    ("Reward", "σ by turn", r"train/reward_?(.*)_std"),
    ("Reward", "parts of scores", r"parts/(.+)"),
    ("Reward", "score", r"score/(.+)"),
    ("Length and truncation", "tokens", r"rollout/len_(?!.*_std$)(.+)"),
    ("Length and truncation", "σ of tokens", r"rollout/len_(.+)_std"),
    ("Length and truncation", "share truncated", r"rollout/truncated_(.+)"),
    ("Length and truncation", "turns", r"rollout/turns?_?(.*)"),
    ("Length and truncation", "without a span, dropped", r"rollout/(no_span|dropped)"),
    ("Groups without signal", "share of groups", r"rollout/zero_signal_(.+)"),
    ("Groups without signal", "filtered", r"rollout/(filtered|kept|resampled)"),
    ("Groups without signal", "problems too long", r"prompts/(dropped|truncated)"),
    ("Groups without signal", "mean |advantage|", r"train/advantage_abs_(.+)"),
    ("Policy", "entropy, nats", r"train/(entropy|span_entropy)"),
    ("Policy", "KL, nats", r"(?:train|kl)/(kl.*|beta)"),
    ("Policy", "clipping", r"train/(clip_frac.*|ratio_max)"),
    ("Policy", "gradient norm", r"train/(grad_norm)"),
    ("Policy", "loss", r"train/(loss|value_loss)"),
    ("Policy", "stated confidences: expected score, mass", r"train/(expected_score|stated_mass)"),
    ("Policy", "learning rate", r"train/(lr.*)"),
    ("Calibration", "held out: accuracy", r"eval/(.+)/accuracy"),
    ("Calibration", "held out: Brier", r"eval/(.+)/brier"),
    ("Calibration", "held out: ECE", r"eval/(.+)/ece"),
    ("Calibration", "held out: AUROC", r"eval/(.+)/auroc"),
    ("Calibration", "batch: Brier", r"calibration/(brier)"),
    ("Calibration", "batch: confidence and gap", r"calibration/(conf_mean|gap)"),
    ("Calibration", "batch: correlation, spread", r"calibration/(corr|conf_spread|alike_share)"),
    ("Speed", "CPU seconds of a step, by part", r"perf/cpu_(.+)_s"),
    ("Speed", "seconds of a step", r"perf/(?!tokens_per_s)(.+)_s"),
    ("Speed", "tokens per second", r"perf/(tokens_per_s)"),
    ("Speed", "shared prefixes", r"perf/(shared_prefix_ratio)"),
    ("Speed", "GiB of the GPU at the peak", r"perf/memory_(.+)_gib"),
    ("Sampler and health", "sampler against learner", r"sampler/(.+)"),
    ("Sampler and health", "health", r"health/(.+)"),
    ("Warm start", "loss of the demonstrations, nats per token", r"warm_start/(loss)"),
)
"""Section, title and metrics of each chart; a group of the pattern is a curve's label."""


def build_metric_sections(names: Iterable[str]) -> list[dict[str, Any]]:
    """Assigns every metric to the first chart whose pattern it matches, the rest by prefix:
    sections with `title` and `charts`; each chart has its `title`, and `curves`, a metric's name
    and its label each."""
    sections: dict[str, list[dict[str, Any]]] = {}
    left = dict.fromkeys(names)
    for section, title, pattern in CHARTS:
        found = {name: m for name in left if (m := re.fullmatch(pattern, name, re.DOTALL))}
        left = {name: None for name in left if name not in found}
        if found:
            labels = [(name, match[1] or name.rpartition("/")[2]) for name, match in found.items()]
            sections.setdefault(section, []).append({"title": title, "curves": labels})
    others: dict[str, list[tuple[str, str]]] = {}
    for name in left:
        prefix, _, label = name.rpartition("/")
        others.setdefault(prefix or "other", []).append((name, label or name))
    for prefix, curves in sorted(others.items()):
        sections.setdefault("Other metrics", []).append({"title": prefix, "curves": curves})
    return [{"title": title, "charts": charts} for title, charts in sections.items()]
