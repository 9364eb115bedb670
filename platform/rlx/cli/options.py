"""Click options that several commands share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["DEFAULT", "json_option", "overrides_option", "registry_option"]

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT = "sqlite:///{home}/registry.db"

registry_option = click.option(
    "--registry",
    "url",
    metavar="URL",
    envvar="RLX_REGISTRY",
    default=DEFAULT,
    help="URL of the registry of runs; by default the one in RLX_HOME.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def overrides_option(
    metavar: str = "PATH=VALUE", help: str = "Override a value; can be repeated."
) -> Callable[[Command], Command]:
    """Returns the option `--set`, which can be repeated."""
    return click.option("--set", "overrides", multiple=True, metavar=metavar, help=help)
