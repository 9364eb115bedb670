"""`rlx plugins`: the click commands that list, show, check and create plugins."""

import traceback
from pathlib import Path
from typing import cast

import click

from rlx.cli.options import complete_plugin, json_option
from rlx.cli.output import print_json, print_text
from rlx.cli.plugins.lookup import describe_plugin_state, find_named_plugins
from rlx.cli.plugins.scaffold import KINDS, write_plugin_scaffold
from rlx.cli.verb_group import SuggestingGroup
from rlx.discovery import (
    Kind,
    PluginFault,
    list_installed_plugins,
    load_plugin,
)
from rlx.text import escape_unprintable


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@json_option
@click.pass_context
def plugins(ctx: click.Context, as_json: bool) -> None:
    """List installed plugins and their state; a broken plugin is a row, not a failure."""
    if ctx.invoked_subcommand is None:
        _print_plugin_table(as_json=as_json)


@plugins.command("list")
@json_option
def list_plugins(as_json: bool) -> None:
    """List installed plugins and their state, as `rlx plugins` does."""
    _print_plugin_table(as_json=as_json)


def _print_plugin_table(*, as_json: bool) -> None:
    states = [(found, *describe_plugin_state(found)) for found in list_installed_plugins()]
    if as_json:
        keys = ("name", "kind", "from", "api", "state")
        entries = [
            dict(zip(keys, (f.name, f.kind, f.source, *rest), strict=True)) for f, *rest in states
        ]
        print_json(entries)
        return
    from rlx.cli.console import print_table

    rows = [(f.name, f.kind, f.source, api, state) for f, api, state in states]
    print_table("NAME", "KIND", "FROM", "API", "STATE", rows=rows)


@plugins.command("show")
@click.argument("name", shell_complete=complete_plugin)
@click.option("--json", "as_json", is_flag=True, help="Print the JSON Schema of the options.")
@click.option(
    "--traceback", "full", is_flag=True, help="Print the full traceback of a failed import."
)
def show(name: str, as_json: bool, full: bool) -> None:
    """Show the description and options of a plugin; NAME may be `distribution:name`."""
    from rlx.cli.plugins.page import show_plugin_page

    for number, found in enumerate(find_named_plugins(name)):
        try:
            plugin = load_plugin(found.kind, f"{found.distribution}:{found.name}")
        except PluginFault as error:
            if full and error.__cause__ is not None:
                print_text("".join(traceback.format_exception(error.__cause__)), err=True)
            raise
        if as_json:
            print_json(plugin.model_json_schema())
            continue
        print_text("\n" if number else "", nl=False)
        show_plugin_page(found, plugin)


@plugins.command("check")
@click.argument("what", metavar="NAME|PATH", shell_complete=complete_plugin)
@click.option("--kind", help="Check only plugins of this kind, if several share the name.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option to check the plugin with, its value as in YAML; can be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result of every promise as JSON.")
def check(what: str, kind: str | None, options: tuple[str, ...], as_json: bool) -> int:
    """Check the promises of a plugin and the examples that it ships.

    NAME is an installed plugin, or `distribution:name`. PATH is a wheel, or the folder of a
    distribution; neither needs to be installed.
    """
    from rlx.cli.plugins.check import run_conformance_checks

    return run_conformance_checks(what, kind, options, as_json=as_json)


@plugins.command("new")
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="reward",
    show_default=True,
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder to create it in; the current one by default.",
)
def new(name: str, kind: str, into: Path) -> None:
    """Write a distribution with a small plugin, its test and its README."""
    folder = write_plugin_scaffold(name, cast(Kind, kind), into)
    print_text(f"wrote {escape_unprintable(str(folder))}", err=True)
    print_text(
        f"pip install -e {escape_unprintable(_format_pip_path(folder))} && rlx plugins check {name}"
    )


def _format_pip_path(folder: Path) -> str:
    """Formats a folder so that pip does not mistake it for a package name."""
    text = str(folder)
    return text if folder.is_absolute() or text.startswith(".") else f"./{text}"
