"""`rlx plugins`: lists, shows, checks and creates plugins."""

import json
import keyword
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from inspect import cleandoc
from pathlib import Path
from string import Template
from typing import Any, cast, get_args
from unittest import SkipTest

import click
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rlx import __version__
from rlx.cli.console import open_console
from rlx.cli.output import print_json, print_text
from rlx.cli.tables import print_table
from rlx.cli.verb_group import format_error_text, json_option
from rlx.discovery import (
    GROUPS,
    InstalledPlugin,
    Kind,
    PluginFault,
    build_plugin,
    build_plugin_diagnostic,
    find_installed_plugin,
    find_kept_plugins,
    list_installed_plugins,
    load_plugin,
)
from rlx.errors import PluginError, RlxError, SpecError
from rlx.plugin import Plugin
from rlx.plugin_files import KeptPlugin, keep_plugin_file
from rlx.spec import PluginUse, read_field_meanings
from rlx.spec.reading import apply_overrides, did_you_mean, parse_yaml_document
from rlx.testing import first_import, list_plugin_checks, required_options
from rlx.text import escape_unprintable, write_text_file


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def plugins(ctx: click.Context, as_json: bool) -> None:
    """List installed plugins and their state; a broken plugin is a row, not a failure."""
    if ctx.invoked_subcommand is not None:
        return
    rows = [
        (found.name, found.kind, found.source, *_describe_plugin_state(found))
        for found in list_installed_plugins()
    ]
    heads = ("name", "kind", "from", "api", "state")
    if as_json:
        print_json([dict(zip(heads, row, strict=True)) for row in rows])
    else:
        print_table(*map(str.upper, heads), rows=rows)


def _describe_plugin_state(found: InstalledPlugin) -> tuple[str, str]:
    """API version and state of a plugin, which is imported for that."""
    try:
        plugin = load_plugin(found.kind, found.full_name)
    except PluginFault as error:
        cause = error.__cause__
        why = f"{type(cause).__name__}: {cause}" if cause else error.diagnostic.message
        return "-", f"broken: {(why.splitlines() or [''])[0]}"
    rivals = [f for f in list_installed_plugins(found.kind) if f.name == found.name]
    clash = f"clash: say {found.distribution}:{found.name}"
    return str(plugin.api), clash if len(rivals) > 1 else "ok"


def _find_named_plugins(name: str) -> list[InstalledPlugin]:
    """The plugins with this name, one per kind; it may be `FILE.py:name` or `distribution:name`."""
    kept = keep_plugin_file(name)
    if KeptPlugin.parse(kept):
        return find_kept_plugins(kept)
    installed = list_installed_plugins()
    bare = name.rpartition(":")[2]
    found, faults = [], []
    for kind in dict.fromkeys(f.kind for f in installed if f.name == bare):
        try:
            found.append(find_installed_plugin(kind, name))
        except PluginFault as fault:
            faults.append(fault)
    if faults and not (found and ":" in name):
        raise faults[0]
    if not found:
        near = did_you_mean(bare, {f.name for f in installed})
        hint = f"did you mean '{near}'? " if near else ""
        if Path(name).exists():
            hint = "a package is installed first, with `pip install -e PATH`; "
        raise PluginError(
            f"no plugin named '{escape_unprintable(name)}': {hint}`rlx plugins` lists all"
        )
    return found


# The page of a plugin ----------------------------------------------------------------------------


@plugins.command("show")
@click.argument("name")
def show(name: str) -> None:
    """Show the description and options of a plugin; NAME may be `distribution:name`.

    RLX_DEBUG=1 shows the traceback of an import that fails.
    """
    named = [(one, load_plugin(one.kind, one.full_name)) for one in _find_named_plugins(name)]
    for number, (found, plugin) in enumerate(named):
        head = f"{found.name}  ({found.kind}, {found.source}, {found.entry_point})"
        text = cleandoc(plugin.__doc__ or "No description.")
        facts = "".join(f"\n{fact}\n" for fact in _list_plugin_facts(plugin))
        lines = f"{head}\n\n{text}\n{facts}".splitlines()
        open_console().print(*([""] if number else []), *map(escape_unprintable, lines), sep="\n")
        rows = list(_list_option_rows(plugin))
        if rows:
            print_text("")
            print_table("OPTION", "TYPE", "DEFAULT", "MEANING", rows=rows)
        else:
            print_text("\nIt has no options.")


def _list_plugin_facts(plugin: type[Plugin]) -> Iterator[str]:
    scope = getattr(plugin, "scope", "sample")
    if scope != "sample":
        alike = {"siblings": "that continue one turn", "group": "of one kind for one prompt"}
        yield f"Looks at all turns {alike[scope]}, together."
    if getattr(plugin, "reads_parent", False) is True:
        yield "Reads the value of another reward: needs `of`."
    if kinds := getattr(plugin, "kinds", ()):
        yield f"Its turns are {', '.join(kinds)}."
    if plugin.needs:
        yield f"Needs: {', '.join(sorted(plugin.needs))}"


def _list_option_rows(
    model: type[BaseModel], before: str = "", instance: BaseModel | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Option, type, default and meaning of each field, below the path `before`, and of the fields
    nested in it; `instance` has the defaults, where the field that holds it has one."""
    schema, meanings = model.model_json_schema(), read_field_meanings(model)
    nested: Mapping[str, str] = getattr(model, "nested", {})
    for name, field in model.model_fields.items():
        option, inner = field.alias or name, None
        if name in nested:
            kind = f"mapping to {nested[name]} plugins"
        else:
            kind = _describe_schema(schema["properties"][option], schema.get("$defs", {}))
            members = (field.annotation, *get_args(field.annotation))
            models = [m for m in members if isinstance(m, type) and issubclass(m, BaseModel)]
            inner = models[0] if len(models) == 1 else None
        if instance is not None:
            default = getattr(instance, name)
        else:
            default = field.get_default(call_default_factory=True)
        if instance is None and field.is_required():
            shown = "required"
        else:
            shown = "" if isinstance(default, BaseModel) else _format_plain_value(default)
        summary = cleandoc(inner.__doc__ or "").partition("\n")[0] if inner else ""
        meaning = field.description or meanings.get(name) or summary
        yield f"{before}{option}", kind, shown, meaning
        if inner is not None:
            below = default if isinstance(default, inner) else None
            yield from _list_option_rows(inner, f"{before}{option}.", below)


def _format_plain_value(value: Any) -> str:
    plain = to_jsonable_python(value, by_alias=True)
    if isinstance(plain, str) and re.fullmatch(r"[\w./+*-]+", plain):
        return plain
    return json.dumps(plain, ensure_ascii=False)


_WORDS = {"boolean": "true | false", "integer": "int", "number": "float", "string": "text"}
_WORDS |= {"array": "list", "object": "mapping"}
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _describe_schema(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """A JSON Schema in plain words: `float ≥ 0`, `seed | last_block`, `list of text`; `known` are
    the `$defs` of the model."""
    if "$ref" in schema:
        return _describe_schema(known[schema["$ref"].rpartition("/")[2]], known)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(_describe_schema(one, known) for one in choices))
    if "enum" in schema or "const" in schema:
        return " | ".join(map(_format_plain_value, schema.get("enum") or [schema["const"]]))
    kind = schema.get("type", "anything")
    word = "path" if schema.get("format") == "path" else _WORDS.get(kind, kind)
    if "prefixItems" in schema:
        return f"[{', '.join(_describe_schema(one, known) for one in schema['prefixItems'])}]"
    inner = schema.get("items") or schema.get("additionalProperties")
    if isinstance(inner, dict):
        held = _describe_schema(inner, known)
        held = f"({held})" if " | " in held else held
        return f"{word} {'of' if word == 'list' else 'to'} {held}"
    limits = [f"{sign} {schema[name]}" for name, sign in _LIMITS.items() if name in schema]
    return f"{word} {', '.join(limits)}".rstrip()


# Promises ----------------------------------------------------------------------------------------


@plugins.command("check")
@click.argument("name")
@click.option("--kind", type=click.Choice([*GROUPS]), help="Which of several plugins of this name.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option to check the plugin with, its value as in YAML; can be repeated.",
)
def check(name: str, kind: str | None, options: tuple[str, ...]) -> int:
    """Check the promises of a plugin and the examples that it ships.

    NAME is an installed plugin, `distribution:name`, or `FILE.py:name`.
    """
    named = [found for found in _find_named_plugins(name) if kind in (None, found.kind)]
    if not named:
        raise PluginError(f"{escape_unprintable(name)} provides no {kind} plugin")
    if options and len(named) > 1:
        kinds = ", ".join(found.kind for found in named)
        raise SpecError(f"--option is for one plugin, and these are {kinds}: add --kind")
    values = apply_overrides(parse_yaml_document("{}", "--option"), options).tree
    codes = []
    for number, found in enumerate(named):
        title = f"{found.name}  ({found.kind}, {found.source})"
        print_text(("\n" if number else "") + escape_unprintable(title))
        try:
            subject = _load_checked_plugin(found, values)
        except RlxError as error:
            print_text("\n".join(f"  {line}" for line in format_error_text(error).splitlines()))
            codes.append(error.exit_code)
        else:
            codes.append(_check_promises(found.kind, subject))
    return min(filter(None, codes), default=0)


def _load_checked_plugin(
    found: InstalledPlugin, options: Mapping[str, Any]
) -> Plugin | type[Plugin]:
    """The plugin class, or the plugin built with the options if there are any.

    Raises:
        PluginFault: the plugin cannot be imported, which is tried in another process first.
        SpecError: the options do not fit, or required ones are missing.
    """
    module, _, attribute = found.entry_point.partition(":")
    died = first_import(module, attribute.partition(".")[0]).died
    if died is not None:
        raise PluginFault(build_plugin_diagnostic(found, f"cannot be imported: {died}"))
    name = found.full_name
    cls = load_plugin(found.kind, name)
    if options:
        return build_plugin(PluginUse.model_validate({**options, "plugin": name}), found.kind)
    missing = [] if getattr(cls, "examples", ()) else required_options(cls)
    if missing:
        raise SpecError(
            f"{found.kind} plugin '{escape_unprintable(found.name)}' cannot be built without "
            f"{', '.join(missing)}: use `--option {missing[0]}=VALUE`, with the value as in YAML"
        )
    return cls


def _check_promises(kind: Kind, subject: Plugin | type[Plugin]) -> int:
    """Prints a line for each promise; returns the exit code."""
    kept = broken = 0
    for promise in list_plugin_checks(kind):
        mark, why = "✓", ""
        try:
            promise(subject)
            kept += 1
        except SkipTest as reason:
            mark, why = "-", str(reason)
        except Exception as error:  # noqa: BLE001  a plugin may raise anything
            cause = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            mark, why = "✗", f"{cause}{error}"
            broken += 1
        shown = f": {escape_unprintable(why)}" if why else ""
        advice = f"\n      = help: {promise.help}" if mark == "✗" and promise.help else ""
        print_text(f"  {mark} {promise.name}{shown}{advice}")
    print_text(f"  {kept} kept, {broken} broken" if broken else f"  all {kept} promises hold")
    return 3 if broken else 0


# A new distribution ------------------------------------------------------------------------------


_IMPLEMENTATIONS: dict[Kind, str | None] = {
    "reward": None,
    "task": None,
    "environment": None,
    "estimator": "advantages.py",
    "mask": "tokens.py",
    "schedule": None,
    "launcher": "ranks.py",
}
"""Of each kind that has templates, the file of the function that a descriptor names, if any."""


@plugins.command("new")
@click.argument("name")
@click.option("--kind", type=click.Choice([*_IMPLEMENTATIONS]), default="reward", show_default=True)
def new(name: str, kind: str) -> None:
    """Write a distribution with a small plugin, its test and its README to a new folder."""
    printable = escape_unprintable(name)
    is_reserved = keyword.iskeyword(name) or name in _IMPLEMENTATIONS
    if is_reserved or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise SpecError(
            f"'{printable}' cannot name a plugin: use a to z, 0 to 9 and _, beginning with a "
            "letter, and no word of Python or kind of plugin"
        )
    if taken := [f for f in list_installed_plugins(cast(Kind, kind)) if f.name == name]:
        raise SpecError(
            f"{kind} plugin '{name}' is provided by {taken[0].source}; choose another name"
        )
    package = f"rlx_{name}"
    folder = Path(re.sub("_+", "-", package).rstrip("-"))
    words = {
        "name": name,
        "attribute": name if kind == "reward" else "".join(map(str.title, name.split("_"))),
        "kind": kind,
        "package": package,
        "distribution": str(folder),
        "version": __version__,
    }

    def fill_template(template: str) -> str:
        text = files("rlx.cli").joinpath("plugin_templates", f"{template}.tmpl")
        return Template(text.read_text(encoding="utf-8")).substitute(words)

    words["usage"] = fill_template(f"usage_{kind}.yaml")
    written = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{package}/__init__.py": f"{kind}.py",
        f"tests/test_{name}.py": "test.py",
    }
    if code := _IMPLEMENTATIONS[cast(Kind, kind)]:
        written[f"{package}/{code}"] = f"{kind}_{code}"
    if folder.exists():
        raise SpecError(f"{folder} already exists; remove it, or choose another name")
    for path, template in written.items():
        write_text_file(folder / path, fill_template(template))
    (folder / package / "py.typed").touch()
    print_text(f"wrote {folder}", err=True)
    print_text(f"pip install -e ./{folder} && rlx plugins check {name}")
