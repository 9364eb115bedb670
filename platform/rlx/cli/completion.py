"""What a shell offers for arguments: runs with their experiments, and installed plugins."""

from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from rlx.errors import RlxError

__all__ = ["complete_plugin", "complete_run"]

MOST = 200
"""Newest runs that are offered."""


def complete_run(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offers the newest runs by their ids, and `latest`; nothing without a registry."""
    from rlx.launch import get_registry_url, open_registry

    offered = [CompletionItem("latest", help="the newest run")]
    with suppress(RlxError), open_registry(get_registry_url(context.params.get("url"))) as registry:
        offered += [
            CompletionItem(row.id, help=f"{row.name} seed {row.seed} {row.effective_status}")
            for row in registry.queries.run_rows()[:MOST]
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
