"""Options that several verbs share."""

import click

__all__ = ["DEFAULT", "registry_option"]

DEFAULT = "sqlite:///{home}/registry.db"

registry_option = click.option(
    "--registry",
    "url",
    metavar="URL",
    envvar="RLX_REGISTRY",
    default=DEFAULT,
    help="The registry of runs; RLX_HOME's own unless given.",
)
