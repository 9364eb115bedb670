"""`rlx plugins`: what is installed, whether it works, and the options of one."""

import json
import traceback
from inspect import cleandoc
from typing import Any

import click

from rlx.cli.text import columns
from rlx.discovery import Found, PluginFault, find, installed, load
from rlx.errors import PluginError
from rlx.plugin import Plugin
from rlx.spec.diagnostic import printable

__all__ = ["plugins"]


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Rows as JSON.")
@click.pass_context
def plugins(ctx: click.Context, as_json: bool) -> None:
    """List plugins; a broken one is a row, not a failure."""
    if ctx.invoked_subcommand is not None:
        return
    states = [(found, *_state(found)) for found in installed()]
    if as_json:
        keys = ("name", "kind", "from", "api", "state")
        rows = [
            dict(zip(keys, (f.name, f.kind, f.source, *rest), strict=True)) for f, *rest in states
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    heads = ("NAME", "KIND", "FROM", "API", "STATE")
    click.echo(columns([(f.name, f.kind, f.source, api, state) for f, api, state in states], heads))


@plugins.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="The options' JSON Schema.")
@click.option("--traceback", "full", is_flag=True, help="Why it fails to import, in full.")
def show(name: str, as_json: bool, full: bool) -> None:
    """Show what a plugin does and its options; NAME may be `distribution:name`."""
    kinds = [f.kind for f in installed() if f.name == name.rpartition(":")[2]]
    if not kinds:
        raise PluginError(f"no plugin named '{printable(name)}'; `rlx plugins` lists all")
    for number, kind in enumerate(dict.fromkeys(kinds)):
        found = find(kind, name)
        try:
            plugin = load(kind, f"{found.distribution}:{found.name}")
        except PluginFault as error:
            if full and error.__cause__ is not None:
                click.echo("".join(traceback.format_exception(error.__cause__)), err=True)
            raise
        if as_json:
            click.echo(json.dumps(plugin.model_json_schema(), indent=2))
            continue
        click.echo(("\n" if number else "") + _page(found, plugin))


def _state(found: Found) -> tuple[str, str]:
    """API version and state of one plugin; importing it is the only way to know."""
    try:
        plugin = load(found.kind, f"{found.distribution}:{found.name}")
    except PluginFault as error:
        cause = error.__cause__
        why = f"{type(cause).__name__}: {cause}" if cause else error.diagnostic.message
        return "-", f"broken: {why.splitlines()[0]}"
    return str(plugin.api), "ok"


def _page(found: Found, plugin: type[Plugin]) -> str:
    head = f"{found.name}  ({found.kind}, {found.source}, {found.value})"
    text = cleandoc(plugin.__doc__ or "No description.")
    rows = [_row(name, field) for name, field in plugin.model_fields.items()]
    table = columns(rows, ("OPTION", "TYPE", "DEFAULT")) if rows else "It has no options."
    body = "\n".join(printable(line) for line in text.splitlines())
    needs = f"\nNeeds: {', '.join(sorted(plugin.needs))}" if plugin.needs else ""
    return f"{printable(head)}\n\n{body}\n{needs}\n{table}"


def _row(name: str, field: Any) -> tuple[str, str, str]:
    kind = field.annotation
    type_name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    limits = ", ".join(str(m) for m in field.metadata)
    default = (
        "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
    )
    return field.alias or name, f"{type_name} {limits}".strip(), default
