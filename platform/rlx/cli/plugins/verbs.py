"""`rlx plugins`: the click commands that list, show, check and create plugins."""

import builtins
import keyword
import re
import traceback
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import cast

import click

from rlx import __version__
from rlx.cli.options import complete_plugin, json_option
from rlx.cli.output import print_json, print_text
from rlx.cli.plugins.page import describe_plugin_state, find_named_plugins
from rlx.cli.verb_group import SuggestingGroup
from rlx.discovery import Kind, PluginFault, list_installed_plugins, load_plugin
from rlx.errors import SpecError
from rlx.text import escape_unprintable

KINDS: tuple[Kind, ...] = (
    "reward",
    "task",
    "environment",
    "estimator",
    "mask",
    "schedule",
    "launcher",
)
"""Kinds that have templates."""


_IMPLEMENTATIONS: dict[Kind, str] = {
    "estimator": "advantages.py",
    "mask": "tokens.py",
    "launcher": "ranks.py",
}
"""The file of the function that a descriptor names, for kinds that have one."""


_is_name = re.compile(r"[a-z][a-z0-9_]*").fullmatch


def write_plugin_scaffold(name: str, kind: Kind, parent: Path) -> Path:
    """Writes a distribution that offers one plugin, and returns its folder.

    Args:
        name: name of the plugin in YAML.
        kind: one of `KINDS`.
        parent: folder to create the distribution's folder in.

    Raises:
        SpecError: the name is invalid or taken, or the folder exists already.
        OSError: the folder cannot be written.
    """
    package = f"rlx_{name}"
    _check_name(name, kind, package)
    distribution = re.sub("_+", "-", package).rstrip("-")
    folder = parent / distribution
    words = {
        "name": name,
        "attribute": name if kind == "reward" else "".join(map(str.title, name.split("_"))),
        "kind": kind,
        "package": package,
        "distribution": distribution,
        "version": __version__,
    }
    words["usage"] = _fill_scaffold_template(f"usage_{kind}.yaml", words)
    written = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{package}/__init__.py": f"{kind}.py",
        f"{package}/py.typed": None,
        f"tests/test_{name}.py": "test.py",
    }
    if code := _IMPLEMENTATIONS.get(kind):
        written[f"{package}/{code}"] = f"{kind}_{code}"
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SpecError(
            f"{escape_unprintable(str(folder))} already exists; remove it, or choose --into"
        ) from None
    for path, template in written.items():
        file = folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            _fill_scaffold_template(template, words) if template else "", encoding="utf-8"
        )
    return folder


def _fill_scaffold_template(template: str, words: dict[str, str]) -> str:
    text = files(__package__).joinpath("templates", f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(words)


def _check_name(name: str, kind: Kind, package: str) -> None:
    """Raises SpecError unless the name is valid and free for a package and a plugin."""
    printable = escape_unprintable(name)
    if not _is_name(name):
        near = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")
        hint = f"; did you mean '{near}'?" if _is_name(near) else ""
        raise SpecError(
            f"'{printable}' cannot name a plugin: use a to z, 0 to 9 and _, beginning with a letter"
            f"{hint}"
        )
    if keyword.iskeyword(name) or hasattr(builtins, name) or name in KINDS:
        raise SpecError(f"'{printable}' cannot name a plugin: Python or rlx reserves it")
    if taken := [f for f in list_installed_plugins(kind) if f.name == name]:
        raise SpecError(
            f"{kind} plugin '{printable}' is provided by {taken[0].source}; choose another name"
        )
    if find_spec(package) is not None:
        raise SpecError(f"a package '{package}' is installed already; choose another name")


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

    try:
        named = [(one, load_plugin(one.kind, one.full_name)) for one in find_named_plugins(name)]
    except PluginFault as error:
        if full and error.__cause__ is not None:
            print_text("".join(traceback.format_exception(error.__cause__)), err=True)
        raise
    for number, (found, plugin) in enumerate(named):
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
