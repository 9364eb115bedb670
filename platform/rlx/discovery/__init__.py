"""Where a name in YAML becomes a plugin.

Looking names up reads the metadata of installed distributions and imports nothing; only the plugins
that an experiment names are imported. One that fails breaks only the experiments that name it.
"""

from rlx.discovery.checks import Plugins, check, check_file, resolve
from rlx.discovery.lookup import (
    GROUPS,
    Found,
    Kind,
    PluginFault,
    find,
    implementation,
    installed,
    load,
)
from rlx.discovery.places import Provenance, make

__all__ = [
    "GROUPS",
    "Found",
    "Kind",
    "PluginFault",
    "Plugins",
    "Provenance",
    "check",
    "check_file",
    "find",
    "implementation",
    "installed",
    "load",
    "make",
    "resolve",
]
