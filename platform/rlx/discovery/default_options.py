"""Finds options that are written in a spec with the values that they have by default."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic_core import to_json

from rlx.discovery.places import PluginReference, fill_profile_options
from rlx.plugin import Plugin
from rlx.spec import PLUGIN_SECTIONS, KeyPath

__all__ = ["list_default_options"]


def list_default_options(
    places: Iterable[PluginReference], built: Mapping[KeyPath, Plugin]
) -> Iterator[KeyPath]:
    """Yields the paths of options without which a plugin would be the same.

    Options in a mapping come before the mapping. Options of plugins that are nested in others, and
    of variants of the task, are not looked at; nor are whole sections, whose defaults a spec holds.
    """
    for place in places:
        is_section = place.path in PLUGIN_SECTIONS
        if place.path in built and place.path[0] != "evaluation" and not is_section:
            for at in _list_omissible_paths(place, built[place.path]):
                yield (*place.path, *at)


def _list_omissible_paths(place: PluginReference, plugin: Plugin) -> Iterator[KeyPath]:
    cls, options = type(plugin), dict(place.options)
    whole = plugin.model_dump(mode="json", by_alias=True)
    for at in list(_list_option_paths(options, ())):
        if at[0] in cls.nested:
            continue
        fewer = _remove_option(options, at)
        filled = fill_profile_options(cls, fewer, place.profile)
        if _dump_plugin(cls, filled) == whole:
            options = fewer
            yield at


def _dump_plugin(cls: type[Plugin], options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns all options of the plugin with these; None if it needs others.

    Third-party code may raise anything where an option is missing.
    """
    try:
        made = cls.model_validate_json(to_json(options), strict=True)
    except Exception:  # noqa: BLE001
        return None
    return made.model_dump(mode="json", by_alias=True)


def _list_option_paths(options: Mapping[str, Any], above: KeyPath) -> Iterator[KeyPath]:
    """Yields the paths of all options, those in a mapping before the mapping."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _list_option_paths(value, (*above, name))
        yield (*above, name)


def _remove_option(options: Mapping[str, Any], at: KeyPath) -> dict[str, Any]:
    head, *rest = at
    if not rest:
        return {name: value for name, value in options.items() if name != head}
    return {**options, str(head): _remove_option(options[str(head)], tuple(rest))}
