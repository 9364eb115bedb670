"""Resolves plugin names in YAML to plugins, through entry points.

Listing plugins reads only the metadata of installed distributions. A plugin is imported when an
experiment names it, so a broken plugin affects only the experiments that use it.
"""

from rlx.discovery.experiment_plugins import (
    DEMONSTRATIONS,
    NEEDS,
    PROVIDERS,
    BuiltPlugins,
    ExperimentPlugins,
    build_named_plugins,
    build_placement,
    build_plugin,
    describe_data_changes,
    describe_plugin_changes,
    list_needed_streams,
    list_plugin_records,
    list_providers,
    resolve_plugins,
)
from rlx.discovery.lookup import (
    GROUPS,
    InstalledPlugin,
    Kind,
    PluginFault,
    bind_implementation,
    build_plugin_diagnostic,
    find_installed_plugin,
    find_kept_plugins,
    import_implementation,
    list_installed_plugins,
    load_plugin,
)

__all__ = [
    "DEMONSTRATIONS",
    "GROUPS",
    "NEEDS",
    "PROVIDERS",
    "BuiltPlugins",
    "ExperimentPlugins",
    "InstalledPlugin",
    "Kind",
    "PluginFault",
    "bind_implementation",
    "build_named_plugins",
    "build_placement",
    "build_plugin",
    "build_plugin_diagnostic",
    "describe_data_changes",
    "describe_plugin_changes",
    "find_installed_plugin",
    "find_kept_plugins",
    "import_implementation",
    "list_installed_plugins",
    "list_needed_streams",
    "list_plugin_records",
    "list_providers",
    "load_plugin",
    "resolve_plugins",
]
