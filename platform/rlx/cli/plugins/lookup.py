"""Finds installed plugins by their name, and says whether they can be imported."""

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


def describe_plugin_state(found: InstalledPlugin) -> tuple[str, str]:
    """Returns API version and state of a plugin, which requires importing it."""
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
    """Returns the plugins with this name, one per kind.

    Raises:
        PluginError: no plugin has the name, or two distributions offer the same kind of it.
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
    # A named distribution need not offer every kind of plugin with this name.
    if faults and not (found and ":" in name):
        raise faults[0]
    return found
