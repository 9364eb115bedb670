"""Maps Pydantic error locations to paths in the YAML and to the types expected there.

Pydantic locates an error in its schema, where the selected member of a union is a step of its own.
`resolve_error_location` converts such a location to the path that the author of the file sees.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typing_extensions import TypeAliasType

from rlx.plugin import PluginSection
from rlx.spec.base import KeyPath

__all__ = [
    "ErrorLocation",
    "is_left_out_by_null",
    "list_choices",
    "map_union_tags",
    "resolve_error_location",
]


Discriminator = str | PluginSection[Any] | None
"""The key that selects the member of a union; or the section whose model is chosen by name."""


@dataclass(frozen=True, slots=True)
class ErrorLocation:
    """Location of an error and the type expected there.

    Attributes:
        path: path in the YAML.
        expected: the type annotation at the path; None if the model does not define it.
        discriminator: the key that selects the member if `expected` is a discriminated union.
        union: path of the last union without a discriminator on the way, or None.
        family: members of the last discriminated union on the way, by tag.
        tags: names that `discriminator` may have.
    """

    path: KeyPath
    expected: Any
    discriminator: str | None = None
    union: KeyPath | None = None
    family: Mapping[str, type[BaseModel]] | None = None
    tags: tuple[str, ...] = ()


def map_union_tags(union: Any, discriminator: str) -> dict[str, type[BaseModel]]:
    """Returns the members of a discriminated union by discriminator value."""
    return {
        tag: member
        for member in get_args(union) or (union,)
        for tag in get_args(member.model_fields[discriminator].annotation)
    }


def list_choices(expected: Any) -> tuple[str, ...]:
    """Returns the names that a type allows: the string values of its literals."""
    expected, _ = _unwrap_type(expected, None)
    if get_origin(expected) is Literal:
        return tuple(value for value in get_args(expected) if isinstance(value, str))
    if _is_union(expected):
        return tuple(name for member in get_args(expected) for name in list_choices(member))
    return ()


def resolve_error_location(
    model: type[BaseModel], location: Sequence[str | int], data: Any
) -> ErrorLocation:
    """Follows a Pydantic error location down from `model`.

    Args:
        model: the model that was validated.
        location: `error["loc"]`.
        data: the validated data; resolves steps that the model does not define.
    """
    expected, discriminator = _unwrap_type(model, None)
    path: KeyPath = ()
    union: KeyPath | None = None
    family: Mapping[str, type[BaseModel]] | None = None
    for step in location:
        if isinstance(discriminator, str):
            family = map_union_tags(expected, discriminator)
            expected, discriminator = _unwrap_type(family.get(str(step)), None)
            continue
        if _is_union(expected):
            union = path
            members = get_args(expected)
            named = (m for m in members if step in (getattr(m, "__name__", None), str(m)))
            expected = next(named, None)
            continue
        below = _get_child_type(expected, step)
        if below is None and (step == "[key]" or not _has_data_at(data, path, step)):
            continue
        path = (*path, step)
        expected, discriminator = below or (None, None)
        if isinstance(discriminator, PluginSection):
            selected = discriminator.get_model(_get_data_at(data, path))
            if selected is not None:
                family, expected, discriminator = discriminator.list_imported(), selected, None
    if isinstance(discriminator, PluginSection):
        names = discriminator.list_names()
        return ErrorLocation(path, expected, discriminator.key, union, family, names)
    names = tuple(map_union_tags(expected, discriminator)) if discriminator else ()
    return ErrorLocation(path, expected, discriminator, union, family, names)


def is_left_out_by_null(model: type[BaseModel], path: KeyPath, data: Any) -> bool:
    """Whether null can only mean that there is no value at a path: it accepts none, or is unknown.

    It does not leave out a required key, nor an option of a plugin, which may have a meaning for
    null.

    Args:
        model: the model of the whole data.
        path: of the value, not the root.
        data: selects the members of unions.
    """
    expected, discriminator = _unwrap_type(model, None)
    for end, step in enumerate(path[:-1], 1):
        below = _get_child_type(expected, step)
        if below is None:
            return False
        expected, discriminator = below
        here = _get_data_at(data, path[:end])
        if isinstance(discriminator, PluginSection):
            expected = discriminator.get_model(here)
        elif discriminator and isinstance(here, dict):
            expected = map_union_tags(expected, discriminator).get(here.get(discriminator, ""))
    if isinstance(expected, type) and issubclass(expected, BaseModel):
        fields = {f.alias or name: f for name, f in expected.model_fields.items()}
        if path[-1] not in fields:
            return expected.model_config.get("extra") == "forbid"
        own = fields[str(path[-1])]
        return not own.is_required() and not _accepts_null(own.annotation)
    origin = get_origin(expected)
    is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return is_mapping and not _accepts_null(get_args(expected)[1])


def _accepts_null(expected: Any) -> bool:
    while isinstance(expected, TypeAliasType) or get_origin(expected) is Annotated:
        is_alias = isinstance(expected, TypeAliasType)
        expected = expected.__value__ if is_alias else get_args(expected)[0]
    return expected is Any or (_is_union(expected) and types.NoneType in get_args(expected))


def _get_child_type(expected: Any, step: str | int) -> tuple[Any, Discriminator] | None:
    """Returns the type one step down and its discriminator; None if the type does not define it."""
    if isinstance(expected, type) and issubclass(expected, BaseModel):
        for name, field in expected.model_fields.items():
            if step in (name, field.alias):
                return _unwrap_type(field.annotation, field)
        return None
    arguments = get_args(expected)
    origin = get_origin(expected)
    if not isinstance(origin, type) or not arguments:
        return None
    if issubclass(origin, Mapping) and step != "[key]":
        return _unwrap_type(arguments[1], None)
    if isinstance(step, int) and issubclass(origin, Sequence | set | frozenset):
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        member = arguments[min(step, len(arguments) - 1)] if fixed else arguments[0]
        return _unwrap_type(member, None)
    return None


def _has_data_at(data: Any, path: KeyPath, step: str | int) -> bool:
    return _get_data_at(data, (*path, step)) is not _NOWHERE


def _get_data_at(data: Any, path: KeyPath) -> Any:
    for key in path:
        try:
            data = data[key]
        except (LookupError, TypeError):
            return _NOWHERE
    return data


_NOWHERE = object()


def _is_union(expected: Any) -> bool:
    return get_origin(expected) in (Union, types.UnionType)


def _unwrap_type(expected: Any, field: FieldInfo | None) -> tuple[Any, Discriminator]:
    """Strips aliases, `Annotated` and `| None`; returns the rest and its discriminator."""
    discriminator: Any = field.discriminator if field is not None else None
    for one in field.metadata if field is not None else ():
        if isinstance(one, PluginSection):
            discriminator = one
    while True:
        if isinstance(expected, TypeAliasType):
            expected = expected.__value__
        elif get_origin(expected) is Annotated:
            found: list[Any] = [
                m.discriminator for m in expected.__metadata__ if isinstance(m, FieldInfo)
            ]
            found += [m for m in expected.__metadata__ if isinstance(m, PluginSection)]
            discriminator = next((d for d in found if d), discriminator)
            expected = get_args(expected)[0]
        elif _is_union(expected) and types.NoneType in get_args(expected):
            members = tuple(m for m in get_args(expected) if m is not types.NoneType)
            expected = Union[members]  # noqa: UP007  (members are known only here)
        else:
            known = isinstance(discriminator, str | PluginSection)
            return expected, discriminator if known else None
