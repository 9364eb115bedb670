"""What has become of a run's plugins since it began."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlx.discovery.places import Provenance

__all__ = ["describe_plugin_changes"]


def describe_plugin_changes(
    now: Sequence[Provenance], then: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yields a note for each plugin whose version, source or default options differ from the run's.

    Args:
        now: the plugins of the run's experiment here.
        then: those that the run recorded.
    """
    used: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in then:
        used.setdefault((record["kind"], record["name"]), []).append(record)
    for plugin in now:
        before = used.get((plugin.kind, plugin.name))
        if before is None:  # used by a phase only; the record covers the base experiment
            continue
        label = f"{plugin.kind} plugin {plugin.name!r}"
        here = f"{plugin.distribution} {plugin.version}"
        there = f"{before[-1]['distribution']} {before[-1]['version']}"
        if here != there:
            yield f"{label} is from {here} here; the run used {there}"
        elif plugin.sha256 != before[-1]["sha256"]:
            yield f"{label} has changed since the run, in the same version, {here}"
        for option, was, is_now in _list_option_changes(plugin, before):
            yield f"{label} had {option}: {was!r} when the run began, and has {is_now!r} now"


def _list_option_changes(
    plugin: Provenance, before: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Any, Any]]:
    """Options that the run's plugin of that name had with another value; none if one of several
    plugins of that name had them all as they are now."""
    changes = [
        [
            (option, was, plugin.options[option])
            for option, was in (record.get("options") or {}).items()
            if option in plugin.options and plugin.options[option] != was
        ]
        for record in before
    ]
    return min(changes, key=len)
