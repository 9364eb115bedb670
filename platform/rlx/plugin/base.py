"""The base classes of plugins and of the sections that they have in YAML."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

API = 1
"""Version of the plugin API. rlx refuses a plugin that needs a newer version."""


LARGEST = 10**9
"""Largest count in an experiment. Sums and products of counts then fit the registry's columns and
the libraries' 64-bit integers."""


Count = Annotated[int, Field(le=LARGEST)]
"""A number of things, such as steps; a field adds its own lower bound. One with an upper bound of
its own is an `int`: of two bounds, pydantic keeps this one."""


class StrictModel(BaseModel):
    """Frozen model that rejects unknown keys, so that a typo never becomes a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Plugin(BaseModel):
    """A named component of an experiment; its fields are the options that YAML may set."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    api: ClassVar[int] = API
    needs: ClassVar[frozenset[str]] = frozenset()
    """Extra streams that this plugin reads, such as `values` or `reference_logprobs`."""
    nested: ClassVar[Mapping[str, str]] = {}
    """Options of type `Mapping[str, Use]` and the kind of plugin they hold, such as
    `{"sources": "reward"}`; `inner` returns those plugins, built and validated.
    """

    _inner: dict[str, Mapping[str, "Plugin"]] = PrivateAttr(default_factory=dict)

    def inner(self, option: str) -> Mapping[str, Any]:
        """The plugins of a nested option, by their keys."""
        return self._inner[option]

    def with_inner(self, plugins: Mapping[str, Mapping[str, "Plugin"]]) -> Self:
        """Returns a copy that holds the plugins of its nested options."""
        holder = self.model_copy()
        holder._inner = dict(plugins)
        return holder

    def check(self) -> None:
        """Checks that everything this plugin reads, such as its data files, is present and valid.

        `rlx submit` calls it before recording anything. The default checks the plugins of nested
        options; plugins with files or packages of their own override it.

        Raises:
            OSError, ImportError: a file or a package is missing on this machine.
            ValueError: the data do not match the options.
        """
        for plugins in self._inner.values():
            for plugin in plugins.values():
                plugin.check()

    def warnings(self) -> Sequence[str]:
        """Warnings about its options, to show when the YAML is read, each with its reason."""
        return ()

    def data(self) -> Mapping[str, str]:
        """Digests, by name, of what this plugin reads besides its options. Each run stores them."""
        return {}


class Use(BaseModel):
    """A plugin named in another plugin's options; the keys besides `plugin` are its own options."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)

    plugin: str


def expand_path(path: str | Path) -> Path:
    """Returns a path with `~` or `~USER` at its start replaced by that user's home folder.

    YAML keeps the path as it is written, so that an experiment means the same for everyone who
    runs it. A path of an unknown user is returned as it is.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111  (the method raises for unknown users)
