"""Prints the page of a plugin: its description and a table of its options."""

import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from typing_extensions import TypeAliasType

from rlx.cli.console import open_console, print_table
from rlx.cli.output import print_text
from rlx.discovery import (
    InstalledPlugin,
    PluginFault,
    find_installed_plugin,
    find_kept_plugins,
    list_installed_plugins,
    load_plugin,
)
from rlx.errors import PluginError
from rlx.plugin import Plugin
from rlx.plugin_files import KeptPlugin, keep_plugin_file
from rlx.spec import read_field_meanings
from rlx.spec.reading import did_you_mean
from rlx.text import escape_unprintable

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
    head = f"{found.name}  ({found.kind}, {found.source}, {found.value})"
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
    """Returns the plugins with this name, one per kind.

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
