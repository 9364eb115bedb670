"""Click options that several commands share."""

import click

__all__ = ["DEFAULT", "registry_option"]

DEFAULT = "sqlite:///{home}/registry.db"

registry_option = click.option(
    "--registry",
    "url",
    metavar="URL",
    envvar="RLX_REGISTRY",
    default=DEFAULT,
    help="URL of the registry of runs; by default the one in RLX_HOME.",
)
