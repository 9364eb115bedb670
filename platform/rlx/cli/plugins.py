"""`rlx plugins`: lists, shows, checks and creates plugins; the page of one has its options."""

import builtins
import json
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from string import Template
from typing import Any, cast, get_args
from unittest import SkipTest

import click
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rlx import __version__
from rlx.cli.console import open_console, print_table
from rlx.cli.output import print_json, print_text
from rlx.cli.verb_group import (
    SuggestingGroup,
    build_error_json,
    format_error_text,
    json_option,
)
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
from rlx.spec.reading import did_you_mean, parse_yaml_document
from rlx.testing import PromiseCheck, first_import, list_plugin_checks, required_options
from rlx.text import escape_unprintable


@click.group(cls=SuggestingGroup, invoke_without_command=True)
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
    """Returns API version and state of a plugin, which requires importing it."""
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
    """Returns the plugins with this name, one per kind; it may be `FILE.py:name`.

    Raises:
        PluginError: no plugin has the name, or two distributions offer the same kind of it.
    """
    kept = keep_plugin_file(name)
    if KeptPlugin.parse(kept):
        return find_kept_plugins(kept)
    bare = name.rpartition(":")[2]
    kinds = dict.fromkeys(f.kind for f in list_installed_plugins() if f.name == bare)
    if not kinds:
        near = did_you_mean(bare, {f.name for f in list_installed_plugins()})
        hint = f"did you mean '{near}'? " if near else ""
        if Path(name).exists():
            hint = "a package is installed first, with `pip install -e PATH`; "
        raise PluginError(
            f"no plugin named '{escape_unprintable(name)}': {hint}`rlx plugins` lists all"
        )
    found, faults = [], []
    for kind in kinds:
        try:
            found.append(find_installed_plugin(kind, name))
        except PluginFault as error:
            faults.append(error)
    # A named distribution need not offer every kind of plugin with this name.
    if faults and not (found and ":" in name):
        raise faults[0]
    return found


# The page of a plugin ----------------------------------------------------------------------------


@plugins.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON Schema of the options.")
def show(name: str, as_json: bool) -> None:
    """Show the description and options of a plugin; NAME may be `distribution:name`.

    RLX_DEBUG=1 shows the traceback of an import that fails.
    """
    named = [(one, load_plugin(one.kind, one.full_name)) for one in _find_named_plugins(name)]
    for number, (found, plugin) in enumerate(named):
        if as_json:
            print_json(plugin.model_json_schema())
            continue
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
    """Yields option, type, default and meaning of each field, and of the fields nested in it."""
    schema, meanings = model.model_json_schema(), read_field_meanings(model)
    nested: Mapping[str, str] = getattr(model, "nested", {})
    for name, field in model.model_fields.items():
        option, inner = field.alias or name, None
        if name in nested:
            kind = f"mapping to {nested[name]} plugins"
        else:
            kind = describe_schema(schema["properties"][option], schema.get("$defs", {}))
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


_WORDS = {
    "array": "list",
    "boolean": "true | false",
    "integer": "int",
    "number": "float",
    "object": "mapping",
    "string": "text",
}
_LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "multipleOf": "a multiple of {}",
    "minLength": "with length ≥ {}",
    "maxLength": "with length ≤ {}",
    "pattern": "like {}",
}


def describe_schema(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Describes a JSON Schema in plain words: `float ≥ 0`, `seed | last_block`, `list of text`.

    Args:
        schema: of one option.
        known: what it may refer to, the `$defs` of the model.
    """

    def describe_element(inner: Mapping[str, Any]) -> str:
        text = describe_schema(inner, known)
        return f"({text})" if " | " in text else text

    if "$ref" in schema:
        return describe_schema(known[schema["$ref"].rpartition("/")[2]], known)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " | ".join(dict.fromkeys(describe_schema(s, known) for s in schema[choice]))
    if "enum" in schema or "const" in schema:
        return " | ".join(map(_format_plain_value, schema.get("enum") or [schema["const"]]))
    kind = schema.get("type", "anything")
    if "prefixItems" in schema:
        return f"[{', '.join(describe_schema(s, known) for s in schema['prefixItems'])}]"
    for inner, word in (("items", "list of"), ("additionalProperties", "mapping to")):
        if isinstance(schema.get(inner), dict) and schema[inner]:
            return f"{word} {describe_element(schema[inner])}"
    bounds = [form.format(schema[name]) for name, form in _LIMITS.items() if name in schema]
    word = "path" if schema.get("format") == "path" else _WORDS.get(kind, kind)
    return " ".join([word, ", ".join(bounds)]).rstrip()


# Promises ----------------------------------------------------------------------------------------


@plugins.command("check")
@click.argument("name")
@click.option("--kind", help="Check only plugins of this kind, if several share the name.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option to check the plugin with, its value as in YAML; can be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result of every promise as JSON.")
def check(name: str, kind: str | None, options: tuple[str, ...], as_json: bool) -> int:
    """Check the promises of a plugin and the examples that it ships.

    NAME is an installed plugin, `distribution:name`, or `FILE.py:name`.
    """
    if kind is not None and kind not in GROUPS:
        raise SpecError(f"no plugin kind {kind!r}; there are: {', '.join(GROUPS)}")
    named = [found for found in _find_named_plugins(name) if kind in (None, found.kind)]
    if not named:
        raise PluginError(f"{escape_unprintable(name)} provides no {kind} plugin")
    values = _parse_plugin_options(options)
    if values and len(named) > 1:
        kinds = ", ".join(found.kind for found in named)
        raise SpecError(f"--option is for one plugin, and these are {kinds}: add --kind")
    entries = []
    for number, found in enumerate(named):
        if not as_json:
            title = f"{found.name}  ({found.kind}, {found.source})"
            print_text(("\n" if number else "") + escape_unprintable(title))
        entries.append(_check_plugin_promises(found, values, aloud=not as_json))
    if as_json:
        print_json(entries)
    return min((entry["exit_code"] for entry in entries if entry["exit_code"]), default=0)


def _parse_plugin_options(texts: Sequence[str]) -> dict[str, Any]:
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SpecError(f"write an option as KEY=VALUE, not {escape_unprintable(text)!r}")
        values[key] = parse_yaml_document(value, f"--option {key}").tree
    return values


def _check_plugin_promises(
    found: InstalledPlugin, options: Mapping[str, Any], *, aloud: bool
) -> dict[str, Any]:
    """Checks one plugin; prints each verdict as it comes if `aloud`."""
    entry = {"name": found.name, "kind": found.kind, "from": found.source}
    try:
        subject = _load_checked_plugin(found, options)
    except RlxError as error:
        if aloud:
            print_text("\n".join(f"  {line}" for line in format_error_text(error).splitlines()))
        return entry | {"exit_code": error.exit_code, "promises": []} | build_error_json(error)
    verdicts, marks = [], {"kept": "✓", "broken": "✗", "skipped": "-"}
    for promise in list_plugin_checks(found.kind):
        state, why = _check_one_promise(promise, subject)
        help_ = promise.help if state == "broken" else ""
        verdicts.append({"promise": promise.name, "state": state, "why": why, "help": help_})
        if aloud:
            shown = f": {escape_unprintable(why)}" if why else ""
            advice = f"\n      = help: {help_}" if help_ else ""
            print_text(f"  {marks[state]} {promise.name}{shown}{advice}")
    states = [verdict["state"] for verdict in verdicts]
    kept, broken = states.count("kept"), states.count("broken")
    if aloud:
        print_text(f"  {kept} kept, {broken} broken" if broken else f"  all {kept} promises hold")
    return entry | {"exit_code": 3 if broken else 0, "promises": verdicts}


def _load_checked_plugin(
    found: InstalledPlugin, options: Mapping[str, Any]
) -> Plugin | type[Plugin]:
    """Returns the plugin class, or the plugin built with the options if there are any.

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


def _check_one_promise(promise: PromiseCheck, subject: Plugin | type[Plugin]) -> tuple[str, str]:
    """Returns `kept`, `broken`, or `skipped` if the promise does not apply, and why."""
    try:
        promise(subject)
    except SkipTest as reason:
        return "skipped", str(reason)
    except AssertionError as error:
        return "broken", str(error)
    except Exception as error:  # noqa: BLE001  a plugin may raise anything
        return "broken", f"{type(error).__name__}: {error}"
    return "kept", ""


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
_is_name = re.compile(r"[a-z][a-z0-9_]*").fullmatch


@plugins.command("new")
@click.argument("name")
@click.option("--kind", type=click.Choice([*_IMPLEMENTATIONS]), default="reward", show_default=True)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder to create it in; the current one by default.",
)
def new(name: str, kind: str, into: Path) -> None:
    """Write a distribution with a small plugin, its test and its README."""
    folder = _write_plugin_scaffold(name, cast(Kind, kind), into)
    print_text(f"wrote {escape_unprintable(str(folder))}", err=True)
    shown = str(folder)
    if not (folder.is_absolute() or shown.startswith(".")):
        shown = f"./{shown}"  # else pip takes it for the name of a package
    print_text(f"pip install -e {escape_unprintable(shown)} && rlx plugins check {name}")


def _write_plugin_scaffold(name: str, kind: Kind, parent: Path) -> Path:
    """Writes a distribution that offers one plugin to a new folder of `parent`; returns it.

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
    if code := _IMPLEMENTATIONS[kind]:
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
        file.write_text(fill_template(template), encoding="utf-8")
    (folder / package / "py.typed").touch()
    return folder


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
    if keyword.iskeyword(name) or hasattr(builtins, name) or name in _IMPLEMENTATIONS:
        raise SpecError(f"'{printable}' cannot name a plugin: Python or rlx reserves it")
    if taken := [f for f in list_installed_plugins(kind) if f.name == name]:
        raise SpecError(
            f"{kind} plugin '{printable}' is provided by {taken[0].source}; choose another name"
        )
    if find_spec(package) is not None:
        raise SpecError(f"a package '{package}' is installed already; choose another name")
