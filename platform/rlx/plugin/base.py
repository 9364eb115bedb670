"""What every plugin is."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr

__all__ = ["API", "Plugin", "Use"]

API = 1
"""Version of everything in this module. A plugin that needs a newer one is refused by name."""


class Plugin(BaseModel):
    """A named piece of an experiment; its fields are the options that YAML may give it."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    api: ClassVar[int] = API
    needs: ClassVar[frozenset[str]] = frozenset()
    """Streams this plugin reads beyond the usual, such as `values` or `reference_logprobs`."""
    nested: ClassVar[Mapping[str, str]] = {}
    """Options of type `Mapping[str, Use]` and the kind of plugin they hold, such as
    `{"sources": "reward"}`; `inner` gives those plugins, made and checked."""

    _inner: dict[str, Mapping[str, "Plugin"]] = PrivateAttr(default_factory=dict)

    def inner(self, option: str) -> Mapping[str, Any]:
        """The plugins that a nested option names, by their keys."""
        return self._inner[option]

    def with_inner(self, plugins: Mapping[str, Mapping[str, "Plugin"]]) -> Self:
        """Returns the same plugin, holding those that its nested options name."""
        holder = self.model_copy()
        holder._inner = dict(plugins)
        return holder

    def check(self) -> None:
        """Looks whether all that this plugin reads is there and in order, such as its data files.

        `rlx submit` calls it before anything is recorded. By default it looks at the plugins that
        nested options name; plugins with files or packages of their own override it.

        Raises:
            OSError, ImportError: this machine lacks a file or a package.
            ValueError: what is there is not what the options say.
        """
        for plugins in self._inner.values():
            for plugin in plugins.values():
                plugin.check()

    def data(self) -> Mapping[str, str]:
        """Digests of what this plugin reads beside its options, by name; kept with every run."""
        return {}


class Use(BaseModel):
    """A plugin named among another's options; the keys beside `plugin` are its own options."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)

    plugin: str
