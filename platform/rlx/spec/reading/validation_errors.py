"""Translates Pydantic validation errors into diagnostics for authors of YAML.

Pydantic locates an error in its schema, where the selected member of a union is a step of its own.
`resolve_error_location` converts such a location to the path that the author of the file sees.
"""

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import TypeAliasType

from rlx.plugin import LARGEST, PLUGIN_FAULT, PluginSection
from rlx.spec.base import KeyPath, get_at_path, list_yaml_keys
from rlx.spec.reading.diagnostics import (
    Diagnostic,
    build_error,
    did_you_mean,
    format_key_path,
)

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
        if below is None and (step == "[key]" or _is_absent(data, (*path, step))):
            continue
        path = (*path, step)
        expected, discriminator = below or (None, None)
        if isinstance(discriminator, PluginSection):
            selected = discriminator.get_model(get_at_path(data, path))
            if selected is not None:
                family, expected, discriminator = discriminator.list_imported(), selected, None
    if isinstance(discriminator, PluginSection):
        names = discriminator.list_names()
        return ErrorLocation(path, expected, discriminator.key, union, family, names)
    names = tuple(map_union_tags(expected, discriminator)) if discriminator else ()
    return ErrorLocation(path, expected, discriminator, union, family, names)


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


def _is_absent(data: Any, path: KeyPath) -> bool:
    return get_at_path(data, path, _ABSENT) is _ABSENT


_ABSENT = object()


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


SELECTORS = frozenset({"engine", "kind", "name", "plugin", "strategy", "type"})
"""Keys that select what their section is."""

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?")
_PERCENT = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?) ?%")
_WORD = re.compile(r"[\w-]+")


def describe_value(value: Any) -> str:
    """Describes a value for an error message: `text 'x'`, `3`, `a list`."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"text {_shorten_value_text(value)!r}"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    return _shorten_value_text(str(value))


def _shorten_value_text(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def suggest_fixes(value: Any, names: Sequence[str], kind: str) -> tuple[str, ...]:
    """Suggests how to mend a value that is not of the expected kind.

    Args:
        value: as written.
        names: names that are allowed instead.
        kind: Pydantic's type of the error.
    """
    if value is None:
        return ("give it a value, or drop the key",)
    if isinstance(value, str) and (near := did_you_mean(value, names)):
        return (f"did you mean '{near}'?",)
    if isinstance(value, str) and value.startswith("${"):
        return ("values are not taken from the environment: use --set",)
    if isinstance(value, str) and kind.startswith(("int_", "float_")) and _NUMBER.fullmatch(value):
        return (f"write it without quotes: {value}",)
    if isinstance(value, str) and kind.startswith("float_") and (part := _PERCENT.fullmatch(value)):
        return (f"write it as a fraction: {float(part[1]) / 100:g}",)
    if isinstance(value, str) and kind.startswith(("tuple_", "list_")):
        parts = [part.strip() for part in value.split(",")]
        written = (part if _WORD.fullmatch(part) else repr(part) for part in parts)
        return (f"write it as a list: [{', '.join(written)}]",)
    if kind.startswith("int_") and isinstance(value, float) and value.is_integer():
        if abs(value) > LARGEST:
            return (f"write it in digits; counts are at most {LARGEST}",)
        return (f"write {int(value)}",)
    if kind.startswith("string_") and isinstance(value, int | float) and value is not None:
        return (f'put it in quotes: "{describe_value(value)}"',)
    if kind.startswith("bool_") and str(value).lower() in ("yes", "no", "on", "off", "0", "1"):
        return ("only true and false are booleans in YAML 1.2",)
    return ()


def suggest_section(path: KeyPath, section: Any, value: str | float) -> tuple[str, ...]:
    """Suggests the section that a bare name, number or true was meant to be, such as
    `estimator: {name: grpo}`, `kl: {coefficient: 0.001}` or `lora: {}`."""
    if not isinstance(section, type) or not issubclass(section, BaseModel):
        return ()
    known = list_yaml_keys(section)
    keys = [key for key in known if key in SELECTORS] or [key for key in known if key == "path"]
    needed = {n: field for n, field in section.model_fields.items() if field.is_required()}
    if value is True and not needed:
        return (f"write it as `{path[-1]}: {{}}`, with its defaults",)
    if not isinstance(value, str):
        keys = [n for n, f in needed.items() if _unwrap_type(f.annotation, None)[0] in (int, float)]
    if len(keys) != 1 or isinstance(value, bool):
        return ()
    return (f"write it as `{path[-1]}: {{{keys[0]}: {_shorten_value_text(str(value))}}}`",)


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "decimal": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "set": "a list",
    "frozen_set": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "dataclass": "a mapping",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "of {min_length} or more characters",
    "string_too_long": "of {max_length} or fewer characters",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "too_short": "of {min_length} or more items",
    "too_long": "of {max_length} or fewer items",
}
_NAME_PATTERN = re.compile(
    r"\^\[(?P<first>[^]]+)\]\[(?P<others>[^]]+)\](\*|\{0,(?P<most>[0-9]+)\})\$"
)
"""The patterns of names: characters to begin with, and characters that may follow."""
_CHARACTERS = re.compile(r"[A-Z]-[A-Z][a-z]-[a-z]|[a-z]-[a-z]|[0-9]-[0-9]|.")
_CHARACTER_WORDS = {"A-Za-z": "letters", "a-z": "lowercase letters", "0-9": "digits"}


@dataclass(frozen=True, slots=True)
class _Fault:
    """One Pydantic error and its location."""

    error: ErrorDetails
    place: ErrorLocation

    @property
    def type(self) -> str:
        return self.error["type"]


def explain_validation_error(
    error: ValidationError,
    model: type[BaseModel],
    data: Any,
    *,
    at: KeyPath = (),
    more_keys: Sequence[str] = (),
) -> list[Diagnostic]:
    """Returns one diagnostic per fault, with paths but without source locations.

    Args:
        error: raised by the validation of `data`.
        model: the model that `data` was validated against.
        data: plain values.
        at: path of `data` in the file.
        more_keys: keys that are allowed at the top level in addition to the model's own.
    """
    errors = [e for e in error.errors(include_url=False) if not _counts_valid_items(e)]
    faults = [_Fault(e, resolve_error_location(model, e["loc"], data)) for e in errors]
    explainer = _Explainer(model, data, at, tuple(more_keys))
    unknown = [explainer.explain_unknown_key(f) for f in faults if f.type == "extra_forbidden"]
    misspelt = {(*d.path[:-1], d.meant) for d in unknown}
    diagnostics = list(unknown)
    for group in _group_union_faults(f for f in faults if f.type != "extra_forbidden"):
        if len(group) > 1:
            diagnostics.append(explainer.explain_union_mismatch(group))
        elif group[0].type == "missing":
            missing = explainer.explain_missing_key(group[0])
            if missing.path not in misspelt:
                diagnostics.append(missing)
        else:
            diagnostics.append(explainer.explain_other_fault(group[0]))
    return diagnostics


def unknown_key(
    path: KeyPath,
    valid: Sequence[str],
    *,
    hint: str = "",
    meant: str = "",
    elsewhere: str = "",
) -> Diagnostic:
    """Returns the diagnostic for an unknown key, with the key that was `meant`, the closest valid
    key, the place `elsewhere` that has such a key, or the list of all valid ones."""
    near = None if hint else meant or did_you_mean(str(path[-1]), valid)
    if near or elsewhere:
        help_ = f"did you mean '{near or elsewhere}'?"
    else:
        help_ = f"valid keys here: {', '.join(valid)}" if valid else "no keys are allowed here"
    message = f"unknown key '{format_key_path(path)}'"
    return replace(build_error(path, message, hint, help_, kind="unknown_key"), meant=near or "")


def _find_selector(key: Any, valid: Sequence[str], *, written: Any) -> str:
    """Returns the key that selects a member in this section, where another section's such key
    stands instead (`mask: {name: ...}` for `strategy`); empty if there is none."""
    here = SELECTORS.intersection(valid)
    if key not in SELECTORS or len(here) != 1 or not isinstance(written, dict):
        return ""
    return next((one for one in here if one not in written), "")


def _counts_valid_items(error: ErrorDetails) -> bool:
    """Whether a "too short" error is a consequence of invalid items in a list that is long
    enough."""
    long_enough = error["type"] == "too_short" and error["ctx"]["min_length"]
    return bool(long_enough) and len(error["input"]) >= long_enough


def _group_union_faults(faults: Iterable[_Fault]) -> Iterator[list[_Fault]]:
    """Groups the faults of each union without a discriminator, where no member matched.

    If the value is a mapping, the faults inside it are reported one by one; otherwise the
    expectations of all members are combined into one message.
    """
    unions: dict[KeyPath, list[_Fault]] = {}
    for fault in faults:
        if fault.place.union is None:
            yield [fault]
        else:
            unions.setdefault(fault.place.union, []).append(fault)
    for path, group in unions.items():
        inside = [f for f in group if len(f.place.path) > len(path)]
        if inside:
            yield from ([f] for f in inside)
        else:
            yield group


@dataclass(frozen=True, slots=True)
class _Explainer:
    model: type[BaseModel]
    data: Any
    at: KeyPath
    more_keys: tuple[str, ...]

    def explain_unknown_key(self, fault: _Fault) -> Diagnostic:
        path = fault.place.path or tuple(fault.error["loc"])
        owner = resolve_error_location(self.model, fault.error["loc"][:-1], self.data)
        valid = list_yaml_keys(owner.expected) if isinstance(owner.expected, type) else ()
        if owner.expected is self.model:
            valid = (*valid, *self.more_keys)
        others = owner.family or {}
        of = [tag for tag, member in others.items() if path[-1] in list_yaml_keys(member)]
        hint = f"'{path[-1]}' belongs to '{of[0]}'" if of else ""
        mapping = get_at_path(self.data, path[:-1])
        meant = "" if of else _find_selector(path[-1], valid, written=mapping)
        elsewhere = "" if of else self._find_elsewhere(path)
        return unknown_key((*self.at, *path), valid, hint=hint, meant=meant, elsewhere=elsewhere)

    def _find_elsewhere(self, path: KeyPath) -> str:
        """Returns the dotted path of the only section that has the key; empty if there is none."""
        sections = {
            name: resolve_error_location(self.model, (name,), self.data).expected
            for name in list_yaml_keys(self.model)
        }
        found = [
            f"{name}.{path[-1]}"
            for name, section in sections.items()
            if isinstance(section, type) and issubclass(section, BaseModel)
            if path[-1] in list_yaml_keys(section)
        ]
        return found[0] if len(found) == 1 else ""

    def explain_missing_key(self, fault: _Fault) -> Diagnostic:
        path = (*self.at, *fault.place.path)
        key = path[-1]
        mapping = get_at_path(self.data, fault.place.path[:-1])
        owner = resolve_error_location(self.model, fault.error["loc"][:-1], self.data)
        if isinstance(key, int):
            return _build_length_error(path[:-1], owner.expected, mapping)
        known = list_yaml_keys(owner.expected) if isinstance(owner.expected, type) else ()
        strange = [k for k in mapping if k not in known] if isinstance(mapping, dict) else []
        selectors = [k for k in strange if key in SELECTORS and k in SELECTORS]
        near = did_you_mean(key, strange) or (selectors or [None])[0]
        help_ = f"should '{near}' be '{key}'?" if near else ""
        where = f"in '{format_key_path(path[:-1])}'" if len(path) > 1 else "at the top of the file"
        message = f"missing key '{key}' {where}"
        return build_error(path, message, help_, kind="missing_key")

    def explain_union_mismatch(self, group: Sequence[_Fault]) -> Diagnostic:
        """Explains a value that matches no member of a union."""
        union = group[0].place.union or ()
        path = (*self.at, *union)
        value = get_at_path(self.data, union)
        wanted = " or ".join(dict.fromkeys(_describe_expected(f.error) for f in group))
        names = [name for f in group for name in _parse_literals(f.error)]
        message = f"'{format_key_path(path)}' must be {wanted}, not {describe_value(value)}"
        kind = next((f.type for f in group if f.type.startswith("string_")), "")
        return build_error(path, message, *suggest_fixes(value, names, kind), kind="value")

    def explain_other_fault(self, fault: _Fault) -> Diagnostic:
        error, place = fault.error, fault.place
        if fault.type in ("value_error", "assertion_error"):
            return self._explain_raised_error(error["ctx"]["error"], place.path)
        if fault.type in ("union_tag_invalid", "union_tag_not_found"):
            return self._tag(fault)
        if fault.type == PLUGIN_FAULT:
            named = (*self.at, *place.path, place.discriminator or "")
            return build_error(named, error["msg"], kind="plugin")
        path = (*self.at, *place.path)
        if fault.type == "too_long" and get_origin(place.expected) is tuple:
            return _build_length_error(path, place.expected, error["input"])
        value, wanted = error["input"], _describe_expected(error)
        if wanted == "a list":
            wanted = _describe_list(place.expected)
        if wanted:
            message = f"'{format_key_path(path)}' must be {wanted}, not {describe_value(value)}"
        else:
            message = f"'{format_key_path(path)}': {error['msg'][:1].lower()}{error['msg'][1:]}"
        helps = suggest_fixes(value, _parse_literals(error), fault.type)
        if wanted == "a mapping" and isinstance(value, str | int | float):
            helps = suggest_section(path, place.expected, value)
        if wanted == "a list" and isinstance(value, dict) and _holds_sections(place.expected):
            helps = ("begin it with '- ', or put it in brackets: it is one item of a list",)
        if path == ("seed",) and isinstance(value, list):
            helps = ("a file has one seed: `rlx submit --seeds 0..4` runs it with several",)
        return build_error(path, message, *helps, kind="value")

    def _tag(self, fault: _Fault) -> Diagnostic:
        place = fault.place
        key = place.discriminator or ""
        path = (*self.at, *place.path, key)
        names = place.tags
        wanted = " or ".join(f"'{name}'" for name in names)
        mapping = get_at_path(self.data, place.path)
        if isinstance(mapping, str) and fault.type == "union_tag_invalid":  # a bare kind
            mapping, path = {key: mapping}, path[:-1]
        if not isinstance(mapping, dict):
            message = (
                f"'{format_key_path(path[:-1])}' must be a mapping, not {describe_value(mapping)}"
            )
            return build_error(path[:-1], message, kind="value")
        if key not in mapping:
            message = f"missing key '{key}' in '{format_key_path(path[:-1])}'"
            help_ = f"it is {wanted}"
            return build_error(path, message, help_, kind="missing_key")
        message = f"'{format_key_path(path)}' must be {wanted}, not {describe_value(mapping[key])}"
        helps = suggest_fixes(mapping[key], names, "")
        near = did_you_mean(str(mapping[key]), names) or ""
        return replace(build_error(path, message, *helps, kind="value"), meant=near)

    def _explain_raised_error(self, error: Exception, path: KeyPath) -> Diagnostic:
        """Explains an exception raised by a validator of rlx or of a plugin."""
        text = str(error)
        word = (re.match(r"[A-Za-z_][\w.-]*", text) or [""])[0]
        steps = tuple(int(s) if s.isdigit() else s for s in word.split("."))
        if len(steps) > 1 and not _is_absent(self.data, steps):
            return build_error((*self.at, *steps), text)
        here = (*self.at, *path)
        message = f"'{format_key_path(here)}': {text}" if here else text
        there = (*path, *steps)
        path = here if _is_absent(self.data, there) else (*self.at, *there)
        return build_error(path, message)


def _holds_sections(expected: Any) -> bool:
    """Whether the items of a list are mappings."""
    item = _unwrap_type(next(iter(get_args(expected)), None), None)[0]
    return isinstance(item, type) and issubclass(item, BaseModel)


def _describe_list(expected: Any) -> str:
    """Describes a list of fixed length by its length."""
    members = get_args(expected)
    fixed = get_origin(expected) is tuple and members and members[-1] is not Ellipsis
    return f"a list of {len(members)} values" if fixed else "a list"


def _build_length_error(path: KeyPath, expected: Any, value: Sequence[Any]) -> Diagnostic:
    """Returns the error for a list that is shorter or longer than a tuple."""
    count = len(get_args(expected))
    wanted = f"a list of {count} values" if count else "a longer list"
    message = f"'{format_key_path(path)}' must be {wanted}, not of {len(value)}"
    is_range = str(path[-1]).endswith("_range") and count == 2
    return build_error(path, message, "write it as [LOW, HIGH]" if is_range else "", kind="value")


def _describe_pattern(pattern: str) -> str:
    """Describes the pattern of a name in words; one of another shape is shown itself."""
    found = _NAME_PATTERN.fullmatch(pattern)
    if found is None:
        return f"of the form {pattern}"
    first, others = ([*_list_characters(found[part])] for part in ("first", "others"))
    words = f"made of {_join_words(others, 'and')}"
    if first != others:
        one = [word if "'" in word else f"a {word.removesuffix('s')}" for word in first]
        words += f", beginning with {_join_words(one, 'or')}"
    return f"{words}, with at most {int(found['most']) + 1} characters" if found["most"] else words


def _list_characters(characters: str) -> Iterator[str]:
    for part in _CHARACTERS.findall(characters):
        yield _CHARACTER_WORDS.get(part, f"'{part}'")


def _join_words(words: Sequence[str], last: str) -> str:
    *others, final = words
    return f"{', '.join(others)} {last} {final}" if others else final


def _describe_expected(error: ErrorDetails) -> str:
    """Describes the expected value; empty if only Pydantic's own message describes it."""
    kind = error["type"]
    if kind == "string_pattern_mismatch":
        return _describe_pattern(error["ctx"]["pattern"])
    if kind in _BOUNDS:
        context = {k: _format_number(v) for k, v in error.get("ctx", {}).items()}
        return _BOUNDS[kind].format_map(context)
    stem = re.sub(r"_(type|parsing|parsing_size|from_float|attributes_type|str)$", "", kind)
    return _KINDS.get(kind) or _KINDS.get(stem.removesuffix("_attributes")) or ""


def _format_number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _parse_literals(error: ErrorDetails) -> list[str]:
    expected = error.get("ctx", {}).get("expected", "")
    return re.findall(r"'([^']*)'", expected) if isinstance(expected, str) else []
