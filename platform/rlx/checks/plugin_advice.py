"""Collects warnings about settings that are allowed but probably unintended."""

from collections.abc import Iterator
from typing import cast

from rlx.checks.cautions import find_cautions
from rlx.checks.plugin_fit import find_ignored_settings, list_singleton_turns
from rlx.discovery import BuiltPlugins
from rlx.plugin import Estimator, Mask, Plugin
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec, KeyPath, TurnSpans
from rlx.spec.reading import Diagnostic, build_warning

__all__ = ["collect_spec_warnings"]


def collect_spec_warnings(spec: ExperimentSpec, plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Yields the plugins' own warnings, and those about the spec, estimator and mask."""
    estimator = cast(Estimator, plugins.built["estimator",])
    mask = cast(Mask, plugins.built["mask",])
    for place, plugin in plugins.list_all():
        for text in plugin.warnings():
            yield build_warning(_find_option_path(place.path, plugin, text), text)
    yield from _check_singleton_groups(spec, estimator)
    for path, text in find_ignored_settings(spec, estimator):
        yield build_warning(path, text)
    yield from _check_mask_spans(spec, mask)
    forced = (
        spec.rollout.forced_answer if isinstance(spec.rollout, EnvironmentRolloutSpec) else None
    )
    if forced is not None and "{prompt}" in forced.template:
        yield build_warning(
            ("rollout", "forced_answer", "template"),
            "rollout.forced_answer.template has {prompt}, which is not filled in here: the "
            "problem was shown before the first turn",
        )
    yield from find_cautions(spec)


def _find_option_path(path: KeyPath, plugin: Plugin, text: str) -> KeyPath:
    """The key that a plugin's warning begins with, such as `numeric` or `estimator.confidence`;
    otherwise the plugin's own."""
    word = text.split()[0] if text.split() else ""
    if path and word.startswith(f"{path[0]}."):
        return tuple(word.split("."))
    return (*path, word) if word in type(plugin).model_fields else path


def _check_mask_spans(spec: ExperimentSpec, mask: Mask) -> Iterator[Diagnostic]:
    """Warns about kinds of turn whose tokens are all masked out, whatever the model generates."""
    for level in spec.rollout.list_levels():
        bare = not level.turn.spans
        if isinstance(mask, TurnSpans) and mask.fallback == "none" and bare:
            yield build_warning(
                ("mask", "fallback"),
                f"mask.fallback is 'none', and {level.key} declares no spans: no {level.kind} ever "
                "learns",
                f"name its tags under {level.key}.spans, or `fallback: response`",
            )


def _check_singleton_groups(spec: ExperimentSpec, estimator: Estimator) -> Iterator[Diagnostic]:
    """Warns about groups of one if the estimator compares siblings."""
    for level in list_singleton_turns(spec):
        if estimator.compares(level.kind):
            yield build_warning(
                ("rollout", *level.counted_at),
                f"{level.count_key} is 1, and estimator '{spec.estimator.plugin}' compares "
                f"siblings: a group of one has no signal, so no {level.kind} learns",
                "sample 2 or more, or let a group of one keep its raw score: `singleton: raw`",
            )
