"""`rlx plugins`: lists, shows, checks and creates plugins; the page of one has its options."""

import builtins
import json
import keyword
import re
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin
from unittest import SkipTest

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from typing_extensions import TypeAliasType

from rlx import __version__
from rlx.cli.console import open_console, print_table
from rlx.cli.output import print_json, print_text
from rlx.cli.verb_group import (
    SuggestingGroup,
    build_error_json,
    complete_plugin,
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
from rlx.testing import (
    PromiseCheck,
    first_import,
    list_plugin_checks,
    required_options,
)
from rlx.text import escape_unprintable

_MARKS = {"kept": "✓", "broken": "✗", "skipped": "-"}


@dataclass(frozen=True, slots=True)
class PromiseVerdict:
    """The result of checking one promise.

    Attributes:
        promise: name of the promise.
        state: "skipped" if the promise does not apply.
        why: why it is not kept; "" if it is.
        help: how to fix it; "" unless it is broken.
    """

    promise: str
    state: Literal["kept", "broken", "skipped"]
    why: str = ""
    help: str = ""


def run_conformance_checks(
    name: str,
    kind: str | None,
    options: Sequence[str],
    *,
    as_json: bool,
) -> int:
    """Checks the plugins with a name, one per kind, and prints the results.

    Args:
        name: as of `find_named_plugins`.
        kind: check only plugins of this kind.
        options: "key=value" each; only if a single plugin is checked.
        as_json: print JSON instead of lines.

    Returns:
        The exit code: 0 when every promise holds, 3 when one is broken.

    Raises:
        RlxError: nothing could be checked.
    """
    if kind is not None and kind not in GROUPS:
        raise SpecError(f"no plugin kind {kind!r}; there are: {', '.join(GROUPS)}")
    plugins = [found for found in find_named_plugins(name) if kind in (None, found.kind)]
    if not plugins:
        raise PluginError(f"{escape_unprintable(name)} provides no {kind} plugin")
    values = _parse_plugin_options(options)
    if values and len(plugins) > 1:
        kinds = ", ".join(f.kind for f in plugins)
        raise SpecError(f"--option is for one plugin, and these are {kinds}: add --kind")
    entries = []
    for number, found in enumerate(plugins):
        if not as_json:
            title = f"{found.name}  ({found.kind}, {found.source})"
            print_text(("\n" if number else "") + escape_unprintable(title))
        entries.append(_check_plugin_promises(found, values, aloud=not as_json))
    if as_json:
        print_json(entries)
    codes = [entry["exit_code"] for entry in entries if entry["exit_code"]]
    return min(codes, default=0)


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
    verdicts = []
    for verdict in (
        _check_one_promise(promise, subject) for promise in list_plugin_checks(found.kind)
    ):
        verdicts.append(verdict)
        if aloud:
            print_text(_format_verdict(verdict))
    broken = sum(v.state == "broken" for v in verdicts)
    if aloud:
        kept = sum(v.state == "kept" for v in verdicts)
        print_text(f"  {kept} kept, {broken} broken" if broken else f"  all {kept} promises hold")
    return entry | {"exit_code": 3 if broken else 0, "promises": [asdict(v) for v in verdicts]}


def _format_verdict(verdict: PromiseVerdict) -> str:
    why = f": {escape_unprintable(verdict.why)}" if verdict.why else ""
    help_ = f"\n      = help: {verdict.help}" if verdict.help else ""
    return f"  {_MARKS[verdict.state]} {verdict.promise}{why}{help_}"


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


def _check_one_promise(promise: PromiseCheck, subject: Plugin | type[Plugin]) -> PromiseVerdict:
    try:
        promise(subject)
    except SkipTest as reason:
        return PromiseVerdict(promise.name, "skipped", str(reason))
    except AssertionError as error:
        return PromiseVerdict(promise.name, "broken", str(error), promise.help)
    except Exception as error:  # noqa: BLE001  a plugin may raise anything
        return PromiseVerdict(
            promise.name, "broken", f"{type(error).__name__}: {error}", promise.help
        )
    return PromiseVerdict(promise.name, "kept")


_WORDS: dict[Any, str] = {
    bool: "true | false",
    int: "int",
    float: "float",
    str: "text",
    Path: "path",
    Any: "anything",
    types.NoneType: "null",
    list: "list",
    tuple: "list",
    dict: "mapping",
}
_LIMITS = {
    "ge": "≥ {}",
    "gt": "> {}",
    "le": "≤ {}",
    "lt": "< {}",
    "multiple_of": "a multiple of {}",
    "min_length": "with length ≥ {}",
    "max_length": "with length ≤ {}",
    "pattern": "like {}",
}
_plain = re.compile(r"[\w./+*-]+").fullmatch


def show_plugin_page(found: InstalledPlugin, plugin: type[Plugin]) -> None:
    """Prints what `rlx plugins show` shows of a plugin."""
    head = f"{found.name}  ({found.kind}, {found.source}, {found.entry_point})"
    text = cleandoc(plugin.__doc__ or "No description.")
    rows = list(_list_option_rows(plugin))
    heads = ("OPTION", "TYPE", "DEFAULT", "MEANING")
    body = "\n".join(escape_unprintable(line) for line in text.splitlines())
    facts = "".join(f"\n{escape_unprintable(fact)}\n" for fact in _list_plugin_facts(plugin))
    open_console().print(f"{escape_unprintable(head)}\n\n{body}\n{facts}")
    if rows:
        print_table(*heads, rows=rows)
    else:
        print_text("It has no options.")


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


# Options -----------------------------------------------------------------------------------------
def _list_option_rows(
    model: type[BaseModel], before: str = "", instance: BaseModel | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Yields option, type, default and meaning of each field, and of the fields nested in it."""
    meanings = read_field_meanings(model)
    kinds: Mapping[str, str] = getattr(model, "nested", {})
    for name, field in model.model_fields.items():
        option = f"{before}{field.alias or name}"
        kind = f"mapping to {kinds[name]} plugins" if name in kinds else describe_type(field)
        inner = None if name in kinds else _find_inner_model(field.annotation)
        default = field.get_default(call_default_factory=True)
        if instance is not None:
            default = getattr(instance, name)
        required = instance is None and field.is_required()
        default_text = (
            "required"
            if required
            else ""
            if isinstance(default, BaseModel)
            else _format_plain_value(default)
        )
        summary = cleandoc(inner.__doc__ or "").splitlines()[:1] if inner is not None else []
        yield (
            option,
            kind,
            default_text,
            field.description or meanings.get(name) or "".join(summary),
        )
        if inner is not None:
            below = default if isinstance(default, inner) else None
            yield from _list_option_rows(inner, f"{option}.", below)


def _find_inner_model(kind: Any) -> type[BaseModel] | None:
    """Returns the only model among the types of an option; None if there is not exactly one."""
    models = [
        k for k in _list_union_members(kind) if isinstance(k, type) and issubclass(k, BaseModel)
    ]
    return models[0] if len(models) == 1 else None


def _format_plain_value(value: Any) -> str:
    plain = to_jsonable_python(value, by_alias=True)
    if isinstance(plain, str) and _plain(plain):
        return plain
    return json.dumps(plain, ensure_ascii=False)


# Types -------------------------------------------------------------------------------------------
def describe_type(kind: Any) -> str:
    """Describes a type in plain words: `float ≥ 0`, `seed | last_block`, `list of text`."""
    if isinstance(kind, FieldInfo):
        return _describe_bounded_type(kind.annotation, kind.metadata)
    if get_origin(kind) is Annotated:
        base, *more = get_args(kind)
        return _describe_bounded_type(base, [m for n in more for m in getattr(n, "metadata", [n])])
    members = _list_union_members(kind)
    if len(members) > 1:
        return " | ".join(dict.fromkeys(describe_type(m) for m in members))
    (kind,) = members
    if get_origin(kind) is Annotated:
        return describe_type(kind)
    if get_origin(kind) is Literal:
        return " | ".join(_format_plain_value(value) for value in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "mapping"
    return _describe_container_type(get_origin(kind) or kind, get_args(kind))


def _describe_container_type(origin: Any, arguments: Sequence[Any]) -> str:
    if not isinstance(origin, type) or not arguments:
        return _WORDS.get(origin) or str(getattr(origin, "__name__", origin))
    if issubclass(origin, Mapping):
        key, value = map(_describe_element_type, arguments)
        return f"mapping to {value}" if key == "text" else f"mapping of {key} to {value}"
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"[{', '.join(map(describe_type, arguments))}]"
    return f"list of {_describe_element_type(arguments[0])}"


def _describe_element_type(kind: Any) -> str:
    text = describe_type(kind)
    return f"({text})" if " | " in text else text


def _describe_bounded_type(kind: Any, metadata: Iterable[Any]) -> str:
    """Describes a type with its bounds, which come before `| null`."""
    bounds = [
        form.format(getattr(m, name))
        for m in metadata
        for name, form in _LIMITS.items()
        if getattr(m, name, None) is not None
    ]
    members = [m for m in _list_union_members(kind) if m is not types.NoneType]
    text = " | ".join(dict.fromkeys(map(describe_type, members)))
    null = " | null" if len(members) < len(_list_union_members(kind)) else ""
    return f"{' '.join([text, ', '.join(bounds)]).rstrip()}{null}"


def _list_union_members(kind: Any) -> tuple[Any, ...]:
    """Returns the members of a union; any other type is its own only member."""
    while isinstance(kind, TypeAliasType):
        kind = kind.__value__
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def describe_plugin_state(found: InstalledPlugin) -> tuple[str, str]:
    """Returns API version and state of a plugin, which requires importing it."""
    try:
        plugin = load_plugin(found.kind, found.full_name)
    except PluginFault as error:
        cause = error.__cause__
        why = f"{type(cause).__name__}: {cause}" if cause else error.diagnostic.message
        return "-", f"broken: {(why.splitlines() or [''])[0]}"
    rivals = [f for f in list_installed_plugins(found.kind) if f.name == found.name]
    clash = len(rivals) > 1
    return str(plugin.api), f"clash: say {found.distribution}:{found.name}" if clash else "ok"


def find_named_plugins(name: str) -> list[InstalledPlugin]:
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


def _fill_scaffold_template(name: str, words: dict[str, str]) -> str:
    template = files("rlx.cli").joinpath("plugin_templates", f"{name}.tmpl")
    return Template(template.read_text(encoding="utf-8")).substitute(words)


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
@click.argument("name", shell_complete=complete_plugin)
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

    return run_conformance_checks(name, kind, options, as_json=as_json)


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
