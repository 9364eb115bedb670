"""Finds installed plugins through entry points and imports the ones that are named."""

import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import Distribution, entry_points
from pathlib import Path
from typing import Any, Literal, get_args

from rlx import __version__
from rlx.errors import PluginError
from rlx.importing import ImportAbortedError, guard_import, source_digest
from rlx.plugin import (
    API,
    FAILED,
    Environment,
    Estimator,
    LauncherPlugin,
    Mask,
    Placement,
    Plugin,
    SamplerPlugin,
    Schedule,
    Task,
    TrackerPlugin,
)
from rlx.plugin_calls import show_plugin_output
from rlx.plugin_files import KeptPlugin
from rlx.spec import EVERY_TURN, PLUGIN_USES, list_yaml_keys
from rlx.spec.reading import Diagnostic, build_error, did_you_mean, format_diagnostic

Kind = Literal[
    "task",
    "environment",
    "reward",
    "estimator",
    "mask",
    "placement",
    "schedule",
    "sampler",
    "launcher",
    "tracker",
]

GROUPS: Mapping[Kind, str] = {kind: f"rlx.{kind}s" for kind in get_args(Kind)}
"""The group of entry points of each kind of plugin."""


@dataclass(frozen=True, slots=True)
class InstalledPlugin:
    """An installed plugin by its name in YAML, as described by its distribution's metadata; its
    entry point is "module:attribute"."""

    kind: Kind
    name: str
    distribution: str
    version: str
    entry_point: str

    @property
    def source(self) -> str:
        """Such as `rlx-example 1.0`."""
        return f"{self.distribution} {self.version}"

    @property
    def full_name(self) -> str:
        """The name that means this plugin, whatever else is installed."""
        is_kept = KeptPlugin.parse(self.name) is not None
        return self.name if is_kept else f"{self.distribution}:{self.name}"


class PluginFault(PluginError):
    """A plugin that cannot be used; `str()` is the diagnostic as text."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        self.diagnostic = diagnostic
        super().__init__(format_diagnostic(diagnostic))


def list_installed_plugins(kind: Kind | None = None) -> tuple[InstalledPlugin, ...]:
    """Returns every plugin of a kind, or of all kinds, sorted by kind and name. Imports nothing."""
    plugins = _scan_entry_points(tuple(sys.path))
    return tuple(plugin for plugin in plugins if kind is None or plugin.kind == kind)


@lru_cache(maxsize=4)
def _scan_entry_points(_: tuple[str, ...]) -> tuple[InstalledPlugin, ...]:
    points = entry_points()
    found = []
    origins: dict[Distribution, tuple[str, str]] = {}  # every access parses the metadata again
    for kind, group in GROUPS.items():
        for point in points.select(group=group):
            if point.dist is None:
                continue
            if point.dist not in origins:
                metadata = point.dist.metadata
                origins[point.dist] = metadata["Name"], metadata["Version"]
            found.append(InstalledPlugin(kind, point.name, *origins[point.dist], point.value))
    return tuple(sorted(found, key=lambda f: (f.kind, f.name, f.distribution)))


def find_installed_plugin(kind: Kind, name: str) -> InstalledPlugin:
    """Returns the plugin named `name`, or `distribution:name`, in YAML.

    Raises:
        PluginFault: no distribution provides it, or several do.
    """
    if kept := KeptPlugin.parse(name):
        return InstalledPlugin(kind, name, kept.file, kept.digest, f"{kept.module}:{kept.name}")
    distribution, colon, bare = name.rpartition(":")
    installed = list_installed_plugins(kind)
    offers = [f for f in installed if f.name == bare]
    # Papers write GAE and GRPO: case matters only if it distinguishes two plugins.
    offers = offers or [f for f in installed if f.name.casefold() == bare.casefold()]
    if colon:
        wanted = _normalize_distribution(distribution)
        offers = [f for f in offers if _normalize_distribution(f.distribution) == wanted]
    if len(offers) == 1:
        return offers[0]
    if not offers:
        raise PluginFault(_diagnose_unknown_plugin(kind, name))
    sources = " and ".join(f.source for f in offers)
    either = " or ".join(f"'{f.distribution}:{f.name}'" for f in offers)
    message = f"{kind} plugin '{name}' is provided by {sources}"
    raise PluginFault(build_error((), message, f"choose one: {either}", kind="plugin"))


def find_kept_plugins(name: str) -> list[InstalledPlugin]:
    """Returns the plugin in a kept file as each kind that it can be; raises `PluginFault` if it
    cannot be imported, or is no plugin of any kind."""
    offers = [find_installed_plugin(kind, name) for kind in GROUPS]
    cls = _import_plugin(find_installed_plugin("reward", name))
    fits = [offer for offer in offers if not _describe_misfit(offer.kind, cls)]
    if not fits:
        wrong = _describe_misfit("reward", cls)
        raise PluginFault(build_plugin_diagnostic(offers[0], f"is invalid: {wrong}"))
    return fits


def load_plugin(kind: Kind, name: str) -> type[Plugin]:
    """Imports a plugin.

    Raises:
        PluginFault: as `find_installed_plugin`, or the plugin cannot be imported, needs a newer
            rlx, or is not a plugin of this kind.
    """
    plugin = find_installed_plugin(kind, name)
    offered = _import_plugin(plugin)
    if wrong := _describe_misfit(kind, offered):
        raise PluginFault(build_plugin_diagnostic(plugin, f"is invalid: {wrong}"))
    cls: type[Plugin] = offered
    if cls.api > API:
        message = f"needs rlx plugin API {cls.api}; this is rlx {__version__} (API {API})"
        help_ = f"upgrade rlx, or install an older {plugin.distribution}"
        raise PluginFault(build_plugin_diagnostic(plugin, message, helps=(help_,)))
    return cls


def _import_plugin(plugin: InstalledPlugin) -> Any:
    """Imports what a plugin's name stands for, which need not be a plugin."""
    kept = KeptPlugin.parse(plugin.name)
    module, _, attribute = plugin.entry_point.partition(":")
    try:
        with guard_import(), show_plugin_output(plugin.name):
            if kept:
                return kept.load()
            offered: Any = import_module(module)
        for part in attribute.split("."):
            offered = getattr(offered, part)
    except (Exception, SystemExit, ImportAbortedError) as error:
        raise PluginFault(_diagnose_import_error(plugin, error)) from error
    return offered


def _normalize_distribution(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


_BASES: Mapping[Kind, type] = {
    "environment": Environment,
    "estimator": Estimator,
    "mask": Mask,
    "placement": Placement,
    "schedule": Schedule,
    "sampler": SamplerPlugin,
    "launcher": LauncherPlugin,
    "tracker": TrackerPlugin,
    "task": Task,
}
_NAME_CODE: Set[Kind] = {"estimator", "mask", "placement", "sampler", "launcher", "tracker"}
"""Kinds whose `implementation` names what a run imports."""


def _describe_misfit(kind: Kind, offered: Any) -> str:
    """Explains why an object is not a plugin of a kind; empty if it is one."""
    if not isinstance(offered, type):
        hint = "; put @reward on the function" if kind == "reward" and callable(offered) else ""
        return f"the entry point names a {type(offered).__name__}, not a class{hint}"
    if not issubclass(offered, Plugin):
        return f"{offered.__name__} does not derive from rlx.plugin.Plugin"
    if kind in _BASES and not issubclass(offered, _BASES[kind]):
        wanted = ("problem", "demonstration") if kind == "task" else ()
        lacks = ", ".join(f"`{name}`" for name in wanted if not hasattr(offered, name))
        what = f": it has no {lacks}" if lacks else ""
        return f"{offered.__name__} is not an rlx.plugin.{_BASES[kind].__name__}{what}"
    if unwritten := sorted(offered.__abstractmethods__):
        return f"{offered.__name__} has no {', '.join(f'`{name}`' for name in unwritten)}"
    if kind == "environment":
        kinds: Any = getattr(offered, "kinds", ())
        if isinstance(kinds, str) or not kinds or not all(isinstance(k, str) and k for k in kinds):
            return f"{offered.__name__} does not set `kinds`, a tuple of names of kinds of turn"
        if reserved := [k for k in (EVERY_TURN, FAILED) if k in kinds]:
            return f"{offered.__name__} has a kind of turn '{reserved[0]}', a name of rlx's own"
    if kind == "reward" and not (hasattr(offered, "score") and hasattr(offered, "scope")):
        return f"{offered.__name__} has no `score` or no `scope`"
    kept = {key for use, one in PLUGIN_USES.items() if one == kind for key in list_yaml_keys(use)}
    if taken := sorted(kept.intersection(list_yaml_keys(offered))):
        return f"its option {taken[0]!r} could never be set: rlx reads that key itself; rename it"
    if kind in _NAME_CODE and not isinstance(getattr(offered, "implementation", None), str):
        return f"{offered.__name__} does not set `implementation`"
    return ""


def compute_plugin_digest(plugin: InstalledPlugin) -> str:
    """Returns the SHA-256 of an imported plugin's source: its module, or all `.py` files of its
    package."""
    if kept := KeptPlugin.parse(plugin.name):
        return source_digest(kept.locate())
    module = sys.modules[plugin.entry_point.partition(":")[0]]
    if module.__file__ is None:
        raise PluginFault(build_plugin_diagnostic(plugin, "has no source file"))
    return source_digest(Path(module.__file__))


# Diagnostics -----------------------------------------------------------------------------------


def _diagnose_unknown_plugin(kind: Kind, name: str) -> Diagnostic:
    offers = {f.name: f for f in list_installed_plugins(kind)}
    helps = []
    if near := did_you_mean(name, offers):
        helps.append(f"did you mean '{near}' ({offers[near].source})?")
    if ".py" in name.lower():
        helps.append("a plugin in a file is named FILE.py:NAME, such as rewards.py:brevity")
    if others := [f.kind for f in list_installed_plugins() if f.name == name]:
        article = "an" if others[0][0] in "aeiou" else "a"
        helps.append(f"'{name}' is the name of {article} {others[0]} plugin")
    notes = (
        f"{len(offers)} installed: {', '.join(offers) or 'none'}",
        f"searched entry-point group '{GROUPS[kind]}' in {sys.prefix}\n"
        "To use your own plugin, install it: `pip install -e ./my-plugin`;\n"
        "reinstall it after its entry points change, then run `rlx plugins`",
    )
    message = f"no {kind} plugin named '{name}'"
    return build_error((), message, *helps, kind="plugin", notes=notes)


def build_plugin_diagnostic(
    plugin: InstalledPlugin, what: str, helps: tuple[str, ...] = (), cause: str = ""
) -> Diagnostic:
    """Returns the diagnostic `KIND plugin 'NAME' WHAT`, with its origin as a note."""
    if KeptPlugin.parse(plugin.name):
        origin = f"from the file {plugin.distribution}, kept as {plugin.version}"
    else:
        origin = f"from {plugin.source} (entry point '{plugin.entry_point}')"
    message = f"{plugin.kind} plugin '{plugin.name}' {what}"
    notes = (cause, origin) if cause else (origin,)
    return build_error((), message, *helps, kind="plugin", notes=notes)


def _diagnose_import_error(plugin: InstalledPlugin, error: BaseException) -> Diagnostic:
    from traceback import extract_tb  # imported only after an error

    cause = f"cause: {type(error).__name__}: {error}"
    own = ("importlib", "rlx/importing.py")
    frames = [
        f for f in extract_tb(error.__traceback__) if not any(name in f.filename for name in own)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        cause += f"\n{error.filename}:{error.lineno}  `{(error.text or '').strip()}`"
    elif len(frames) > 1:  # the first frame is rlx's own
        cause += f"\n{frames[-1].filename}:{frames[-1].lineno}  `{frames[-1].line}`"
    install = ""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        install = f"`pip install {error.name}`, or "
    fault = f"the plugin is at fault, not the spec: {install}remove it from the spec"
    if KeptPlugin.parse(plugin.name):
        fault = (
            f"mend {plugin.distribution}: rlx imports a copy of it, without the modules beside it"
        )
    helps = (fault, f"full traceback: `RLX_DEBUG=1 rlx plugins show {plugin.name}`")
    return build_plugin_diagnostic(plugin, "failed to import", helps, cause)
