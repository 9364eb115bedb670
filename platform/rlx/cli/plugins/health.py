"""Records the state of this machine's plugins in the registry for the dashboard.

The dashboard itself imports no plugins.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlx.cli.plugins.lookup import describe_plugin_state
from rlx.discovery import InstalledPlugin, list_installed_plugins
from rlx.launch import open_registry, this_machine
from rlx_registry import PluginRecord

__all__ = ["record_health", "record_promises"]

Key = tuple[str, str, str]


def record_health(url: str, tell: Callable[[str], None] = lambda _: None) -> None:
    """Imports every installed plugin and records whether that succeeds.

    Results of `rlx plugins check` for the same version are kept, unless the import fails.

    Args:
        url: URL of the registry.
        tell: called with the name of each plugin before it is imported.

    Raises:
        RlxError: the registry cannot be written.
    """
    host = this_machine()
    rows = {
        _get_plugin_key(row): row
        for row in (_check_plugin_import(found, host, tell) for found in list_installed_plugins())
    }
    with open_registry(url, read_only=False) as registry:
        for known in registry.machines.plugins(host):
            row = rows.get(_get_plugin_key(known))
            if row is not None and known.message and row.state == "ok":
                same = (row.version, row.entry_point) == (known.version, known.entry_point)
                rows[_get_plugin_key(known)] = known if same else row
        registry.machines.put_plugins(host, list(rows.values()))


def record_promises(url: str, found: InstalledPlugin, entry: Mapping[str, Any]) -> None:
    """Records the result of `rlx plugins check` for an installed plugin.

    Raises:
        RlxError: the registry cannot be written.
    """
    promises = [promise["state"] for promise in entry["promises"]]
    broken = promises.count("broken")
    state: Literal["ok", "broken"] = "broken" if entry["exit_code"] else "ok"
    message = f"{promises.count('kept')} promises kept" + (f", {broken} broken" if broken else "")
    if "error" in entry:
        message = entry["error"]["message"]
    host = this_machine()
    row = _build_plugin_record(found, host, state, message)
    with open_registry(url, read_only=False) as registry:
        others = [
            known
            for known in registry.machines.plugins(host)
            if _get_plugin_key(known) != _get_plugin_key(row)
        ]
        registry.machines.put_plugins(host, [*others, row])


def _check_plugin_import(
    found: InstalledPlugin, host: str, tell: Callable[[str], None]
) -> PluginRecord:
    tell(f"{found.distribution}:{found.name}")
    _, state = describe_plugin_state(found)
    if state == "ok":
        return _build_plugin_record(found, host, "ok", "")
    kind, _, why = state.partition(": ")
    return _build_plugin_record(found, host, "clash" if kind == "clash" else "broken", why)


def _build_plugin_record(
    found: InstalledPlugin, host: str, state: Literal["ok", "broken", "clash"], message: str
) -> PluginRecord:
    return PluginRecord(
        host=host,
        kind=found.kind,
        distribution=found.distribution,
        name=found.name,
        version=found.version,
        entry_point=found.value,
        state=state,
        message=message,
        at=time.time(),
    )


def _get_plugin_key(row: PluginRecord) -> Key:
    return row.kind, row.distribution, row.name
