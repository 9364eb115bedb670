"""Click options and arguments that several commands share, and what a shell offers for them."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from rlx.errors import RlxError

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_REGISTRY = "sqlite:///{home}/registry.db"
RUNS_OFFERED = 200
"""Newest runs that a shell offers."""

registry_option = click.option(
    "--registry",
    "url",
    metavar="URL",
    envvar="RLX_REGISTRY",
    default=DEFAULT_REGISTRY,
    help="URL of the registry of runs; by default the one in RLX_HOME.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def overrides_option(
    metavar: str = "PATH=VALUE", help: str = "Override a value; can be repeated."
) -> Callable[[Command], Command]:
    """Returns the option `--set`, which can be repeated."""
    return click.option("--set", "overrides", multiple=True, metavar=metavar, help=help)


def complete_run(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offers the newest runs by their ids, and `latest`; nothing without a registry."""
    from rlx.launch import get_registry_url, open_registry

    offered = [CompletionItem("latest", help="the newest run")]
    with suppress(RlxError), open_registry(get_registry_url(context.params.get("url"))) as registry:
        offered += [
            CompletionItem(row.id, help=f"{row.name} seed {row.seed} {row.effective_status}")
            for row in registry.queries.run_rows()[:RUNS_OFFERED]
        ]
    return [item for item in offered if str(item.value).startswith(incomplete)]


def complete_plugin(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offers the installed plugins by their names."""
    from rlx.discovery import list_installed_plugins

    return [
        CompletionItem(found.name, help=f"{found.kind} of {found.source}")
        for found in list_installed_plugins()
        if found.name.startswith(incomplete)
    ]
