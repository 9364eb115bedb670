"""Installed plugins by name, and whether one can be imported."""

from rlx.discovery import (
    InstalledPlugin,
    PluginFault,
    find_installed_plugin,
    list_installed_plugins,
    load_plugin,
)
from rlx.errors import PluginError
from rlx.spec.reading import did_you_mean
from rlx.text import escape_unprintable

__all__ = ["describe_plugin_state", "find_named_plugins"]


def describe_plugin_state(found: InstalledPlugin) -> tuple[str, str]:
    """API version and state of one plugin; importing it is the only way to know."""
    try:
        plugin = load_plugin(found.kind, f"{found.distribution}:{found.name}")
    except PluginFault as error:
        cause = error.__cause__
        why = f"{type(cause).__name__}: {cause}" if cause else error.diagnostic.message
        return "-", f"broken: {(why.splitlines() or [''])[0]}"
    rivals = [f for f in list_installed_plugins(found.kind) if f.name == found.name]
    clash = len(rivals) > 1
    return str(plugin.api), f"clash: say {found.distribution}:{found.name}" if clash else "ok"


def find_named_plugins(name: str) -> list[InstalledPlugin]:
    """The plugins of a name, one of each kind that has it.

    Raises:
        PluginError: there is none, or two distributions offer one kind of it.
    """
    bare = name.rpartition(":")[2]
    kinds = dict.fromkeys(f.kind for f in list_installed_plugins() if f.name == bare)
    if not kinds:
        near = did_you_mean(bare, {f.name for f in list_installed_plugins()})
        hint = f"did you mean '{near}'? " if near else ""
        raise PluginError(
            f"no plugin named '{escape_unprintable(name)}': {hint}`rlx plugins` lists all"
        )
    found, faults = [], []
    for kind in kinds:
        try:
            found.append(find_installed_plugin(kind, name))
        except PluginFault as error:
            faults.append(error)
    # A distribution that is named may well offer one kind of the name alone.
    if faults and not (found and ":" in name):
        raise faults[0]
    return found
