"""Translates Pydantic validation errors into diagnostics for authors of YAML.

Pydantic locates an error in its schema, where the selected member of a union is a step of its own.
`_Fault.locate` converts such a location to the path that the author of the file sees.
"""

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_json
from typing_extensions import TypeAliasType

from rlx.plugin import LARGEST, PLUGIN_FAULT, PluginSection
from rlx.spec.base import KeyPath, get_at_path, list_yaml_keys
from rlx.spec.reading.diagnostics import Diagnostic, build_error, did_you_mean, format_key_path

_Model = TypeVar("_Model", bound=BaseModel)
_ABSENT = object()
_SELECTORS = frozenset({"engine", "kind", "name", "plugin", "strategy", "type"})
"""Keys that select what their section is."""

# What stands where -------------------------------------------------------------------------------

_Discriminator = str | PluginSection[Any] | None
"""The key that selects the member of a union; or the section whose model is chosen by name."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """One Pydantic error, and what is expected where it is.

    Attributes:
        path: path in the validated values.
        expected: type there; None if the model does not define it.
        owner: type of what contains it.
        selector: the key that selects the member if `expected` is a discriminated union.
        tags: names that `selector` may have.
        union: path of the last union without a discriminator on the way, or None.
        family: members of the last discriminated union on the way, by tag.
    """

    error: ErrorDetails
    path: KeyPath
    expected: Any
    owner: Any
    selector: str
    tags: tuple[str, ...]
    union: KeyPath | None
    family: Mapping[str, type[BaseModel]]

    @property
    def kind(self) -> str:
        return self.error["type"]

    @classmethod
    def locate(cls, error: ErrorDetails, model: type[BaseModel], data: Any) -> "_Fault":
        """Follows an error's location down from the model that `data` was validated against."""
        path: KeyPath = ()
        union: KeyPath | None = None
        family: Mapping[str, type[BaseModel]] = {}
        owner: Any = None
        expected, discriminator = _unwrap_type(model)
        for step in error["loc"]:
            if isinstance(discriminator, str):
                family = _map_union_tags(expected, discriminator)
                expected, discriminator = _unwrap_type(family.get(str(step)))
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
            owner, path = expected, (*path, step)
            expected, discriminator = below or (None, None)
            if isinstance(discriminator, PluginSection):
                selected = discriminator.get_model(get_at_path(data, path))
                if selected is not None:
                    family, expected, discriminator = discriminator.list_imported(), selected, None
        selector, tags = "", tuple[str, ...]()
        if isinstance(discriminator, PluginSection):
            selector, tags = discriminator.key, discriminator.list_names()
        elif discriminator:
            selector, tags = discriminator, tuple(_map_union_tags(expected, discriminator))
        return cls(error, path, expected, owner, selector, tags, union, family)

    @property
    def keys_beside(self) -> tuple[str, ...]:
        """The keys of the section that contains it."""
        return list_yaml_keys(self.owner) if _is_section(self.owner) else ()


def _map_union_tags(union: Any, discriminator: str) -> dict[str, type[BaseModel]]:
    """Returns the members of a discriminated union by discriminator value."""
    return {
        tag: member
        for member in get_args(union) or (union,)
        for tag in get_args(member.model_fields[discriminator].annotation)
    }


def _get_child_type(expected: Any, step: str | int) -> tuple[Any, _Discriminator] | None:
    """Returns the type one step down and its discriminator; None if the type does not define it."""
    if _is_section(expected):
        fields = expected.model_fields.items()
        found = next((field for name, field in fields if step in (name, field.alias)), None)
        return found and _unwrap_type(found.annotation, found)
    arguments, origin = get_args(expected), get_origin(expected)
    if not isinstance(origin, type) or not arguments:
        return None
    if issubclass(origin, Mapping) and step != "[key]":
        return _unwrap_type(arguments[1])
    if isinstance(step, int) and issubclass(origin, Sequence | set | frozenset):
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        return _unwrap_type(arguments[min(step, len(arguments) - 1)] if fixed else arguments[0])
    return None


def _is_absent(data: Any, path: KeyPath) -> bool:
    return get_at_path(data, path, _ABSENT) is _ABSENT


def _is_section(expected: Any) -> bool:
    return isinstance(expected, type) and issubclass(expected, BaseModel)


def _is_union(expected: Any) -> bool:
    return get_origin(expected) in (Union, types.UnionType)


def _unwrap_type(expected: Any, field: FieldInfo | None = None) -> tuple[Any, _Discriminator]:
    """Strips aliases, `Annotated` and `| None`; returns the rest and its discriminator."""
    metadata: list[Any] = [field, *field.metadata] if field is not None else []
    while True:
        if isinstance(expected, TypeAliasType):
            expected = expected.__value__
        elif get_origin(expected) is Annotated:
            metadata = [*expected.__metadata__, *metadata]
            expected = get_args(expected)[0]
        elif _is_union(expected) and types.NoneType in get_args(expected):
            members = tuple(m for m in get_args(expected) if m is not types.NoneType)
            expected = Union[members]  # noqa: UP007  (members are known only here)
        else:
            found = (one.discriminator if isinstance(one, FieldInfo) else one for one in metadata)
            return expected, next((d for d in found if isinstance(d, str | PluginSection)), None)


# Faults ------------------------------------------------------------------------------------------


def validate_values(model: type[_Model], values: Any) -> tuple[_Model | None, list[Diagnostic]]:
    """Returns plain values as a model, or None and the errors of single values."""
    try:
        # Strict JSON mode accepts a list for a tuple, but rejects "5" or true for a number.
        return model.model_validate_json(to_json(values), strict=True), []
    except ValidationError as error:
        return None, explain_validation_error(error, model, values)


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
    faults = [
        _Fault.locate(e, model, data)
        for e in error.errors(include_url=False)
        if not _counts_valid_items(e)
    ]
    explainer = _Explainer(model, data, at, tuple(more_keys))
    unknown = [explainer.explain_unknown_key(f) for f in faults if f.kind == "extra_forbidden"]
    meant = {(*d.path[:-1], d.meant) for d in unknown}
    groups = _group_union_faults(f for f in faults if f.kind != "extra_forbidden")
    others = (explainer.explain(group) for group in groups)
    return [*unknown, *(d for d in others if d.kind != "missing_key" or d.path not in meant)]


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
        if fault.union is None:
            yield [fault]
        else:
            unions.setdefault(fault.union, []).append(fault)
    for path, group in unions.items():
        inside = [[f] for f in group if len(f.path) > len(path)]
        yield from inside or [group]


@dataclass(frozen=True, slots=True)
class _Explainer:
    model: type[BaseModel]
    data: Any
    at: KeyPath
    more_keys: tuple[str, ...]

    def explain_unknown_key(self, fault: _Fault) -> Diagnostic:
        """Suggests the key that was meant: one of another member of the union, the section's own
        selector, the closest key, or the only one of that name in another section."""
        path = fault.path or tuple(fault.error["loc"])
        key, valid = path[-1], fault.keys_beside
        if fault.owner is self.model:
            valid = (*valid, *self.more_keys)
        message = f"unknown key '{format_key_path((*self.at, *path))}'"
        of = [tag for tag, member in fault.family.items() if key in list_yaml_keys(member)]
        hint = f"'{key}' belongs to '{of[0]}'" if of else ""
        near = None
        elsewhere = []
        if not of:
            written = get_at_path(self.data, path[:-1])
            selectors = [one for one in valid if one in _SELECTORS]
            if key in _SELECTORS and len(selectors) == 1 and selectors[0] not in written:
                near = selectors[0]
            near = near or did_you_mean(str(key), valid)
            for name in list_yaml_keys(self.model):
                there: Any = {**fault.error, "loc": (name, key)}
                if key in _Fault.locate(there, self.model, self.data).keys_beside:
                    elsewhere.append(f"{name}.{key}")
        meant = near or (elsewhere[0] if len(elsewhere) == 1 else "")
        if meant:
            help_ = f"did you mean '{meant}'?"
        else:
            help_ = f"valid keys here: {', '.join(valid)}" if valid else "no keys are allowed here"
        fault_ = build_error((*self.at, *path), message, hint, help_, kind="unknown_key")
        return replace(fault_, meant=near or "")

    def explain(self, group: Sequence[_Fault]) -> Diagnostic:
        """Explains a fault, or those of all members of a union that a value matches none of."""
        fault, union = group[0], group[0].union or ()
        path, error = (*self.at, *fault.path), fault.error
        if len(group) > 1:
            value = get_at_path(self.data, union)
            wanted = " or ".join(dict.fromkeys(_describe_expected(f.error) for f in group))
            names = [name for f in group for name in _parse_literals(f.error)]
            kind = next((f.kind for f in group if f.kind.startswith("string_")), "")
            helps = _suggest_fixes(value, names, kind)
            return _build_value_error((*self.at, *union), wanted, value, *helps)
        if fault.kind == "missing":
            return self._explain_missing_key(fault, path)
        if fault.kind in ("value_error", "assertion_error"):
            return self._explain_raised_error(str(error["ctx"]["error"]), fault.path)
        if fault.kind in ("union_tag_invalid", "union_tag_not_found"):
            return self._explain_tag(fault, path)
        if fault.kind == PLUGIN_FAULT:
            return build_error((*path, fault.selector), error["msg"], kind="plugin")
        if fault.kind == "too_long" and get_origin(fault.expected) is tuple:
            return _build_length_error(path, fault.expected, error["input"])
        value, wanted = error["input"], _describe_expected(error)
        helps = _suggest_fixes(value, _parse_literals(error), fault.kind)
        if wanted == "a list":
            wanted = _describe_list(fault.expected)
            item = _unwrap_type(next(iter(get_args(fault.expected)), None))[0]
            if wanted == "a list" and isinstance(value, dict) and _is_section(item):
                helps = ("begin it with '- ', or put it in brackets: it is one item of a list",)
        elif wanted == "a mapping" and isinstance(value, str | int | float):
            helps = _suggest_section(path, fault.expected, value)
        elif not wanted:
            message = f"'{format_key_path(path)}': {error['msg'][:1].lower()}{error['msg'][1:]}"
            return build_error(path, message, *helps, kind="value")
        if path == ("seed",) and isinstance(value, list):
            helps = ("a file has one seed: `rlx submit --seeds 0..4` runs it with several",)
        return _build_value_error(path, wanted, value, *helps)

    def _explain_missing_key(self, fault: _Fault, path: KeyPath) -> Diagnostic:
        key, mapping = path[-1], get_at_path(self.data, fault.path[:-1])
        if isinstance(key, int):
            return _build_length_error(path[:-1], fault.owner, mapping)
        written = mapping if isinstance(mapping, dict) else ()
        strange = [k for k in written if k not in fault.keys_beside]
        near = did_you_mean(key, strange)
        if not near and key in _SELECTORS:
            near = next((k for k in strange if k in _SELECTORS), None)
        help_ = f"should '{near}' be '{key}'?" if near else ""
        where = f"in '{format_key_path(path[:-1])}'" if len(path) > 1 else "at the top of the file"
        return build_error(path, f"missing key '{key}' {where}", help_, kind="missing_key")

    def _explain_tag(self, fault: _Fault, path: KeyPath) -> Diagnostic:
        """Explains the name that selects a section's kind, where it is unknown or missing."""
        key, names = fault.selector, fault.tags
        wanted = " or ".join(f"'{name}'" for name in names)
        value, label = get_at_path(self.data, fault.path), format_key_path(path)
        is_bare = isinstance(value, str) and fault.kind == "union_tag_invalid"
        if isinstance(value, dict):
            if key not in value:
                message = f"missing key '{key}' in '{label}'"
                return build_error((*path, key), message, f"it is {wanted}", kind="missing_key")
            path, value = (*path, key), value[key]
        elif not is_bare:
            return _build_value_error(path, "a mapping", value)
        error = _build_value_error(path, wanted, value, *_suggest_fixes(value, names, ""))
        return replace(error, meant=did_you_mean(str(value), names) or "")

    def _explain_raised_error(self, text: str, path: KeyPath) -> Diagnostic:
        """Explains an exception raised by a validator of rlx or of a plugin, at the key whose path
        its text begins with."""
        word = (re.match(r"[A-Za-z_][\w.-]*", text) or [""])[0]
        steps = tuple(int(s) if s.isdigit() else s for s in word.split("."))
        if len(steps) > 1 and not _is_absent(self.data, steps):
            return build_error((*self.at, *steps), text)
        here = (*self.at, *path)
        message = f"'{format_key_path(here)}': {text}" if here else text
        is_absent = _is_absent(self.data, (*path, *steps))
        return build_error(here if is_absent else (*here, *steps), message)


# Words -------------------------------------------------------------------------------------------

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
_PATTERN_WORDS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": (
        "made of letters, digits, '.', '_' and '-', beginning with a letter or a digit"
    ),
    r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$": (
        "made of letters, digits, '_' and '-', beginning with a letter or a digit, with at most 40 "
        "characters"
    ),
    r"^[A-Za-z_][A-Za-z0-9_-]*$": (
        "made of letters, digits, '_' and '-', beginning with a letter or '_'"
    ),
    r"^[a-z][a-z0-9_]*$": (
        "made of lowercase letters, digits and '_', beginning with a lowercase letter"
    ),
    r"^[a-z][a-z0-9-]*$": (
        "made of lowercase letters, digits and '-', beginning with a lowercase letter"
    ),
}
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?")
_PERCENT = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?) ?%")
_WORD = re.compile(r"[\w-]+")


def _build_value_error(path: KeyPath, wanted: str, value: Any, *helps: str) -> Diagnostic:
    message = f"'{format_key_path(path)}' must be {wanted}, not {_describe_value(value)}"
    return build_error(path, message, *helps, kind="value")


def _describe_value(value: Any) -> str:
    """Describes a value for an error message: `text 'x'`, `3`, `a list`."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"text {_shorten(value)!r}"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    return _shorten(str(value))


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def _describe_expected(error: ErrorDetails) -> str:
    """Describes the expected value; empty if only Pydantic's own message describes it."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "string_pattern_mismatch":
        return _PATTERN_WORDS.get(context["pattern"], f"of the form {context['pattern']}")
    if kind in _BOUNDS:
        numbers = {k: f"{v:g}" for k, v in context.items() if isinstance(v, float) and abs(v) < 1e6}
        return _BOUNDS[kind].format_map({**context, **numbers})
    stem = re.sub(r"_(type|parsing|parsing_size|from_float|attributes_type|str)$", "", kind)
    return _KINDS.get(kind) or _KINDS.get(stem.removesuffix("_attributes")) or ""


def _parse_literals(error: ErrorDetails) -> list[str]:
    expected = error.get("ctx", {}).get("expected", "")
    return re.findall(r"'([^']*)'", expected) if isinstance(expected, str) else []


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


def _suggest_fixes(value: Any, names: Sequence[str], kind: str) -> tuple[str, ...]:
    """Suggests how to mend a value that is not of the expected kind.

    Args:
        value: as written.
        names: names that are allowed instead.
        kind: Pydantic's type of the error.
    """
    help_ = ""
    if value is None:
        help_ = "give it a value, or drop the key"
    elif kind.startswith("bool_") and str(value).lower() in ("yes", "no", "on", "off", "0", "1"):
        help_ = "only true and false are booleans in YAML 1.2"
    elif isinstance(value, str):
        if near := did_you_mean(value, names):
            help_ = f"did you mean '{near}'?"
        elif value.startswith("${"):
            help_ = "values are not taken from the environment: use --set"
        elif kind.startswith(("int_", "float_")) and _NUMBER.fullmatch(value):
            help_ = f"write it without quotes: {value}"
        elif kind.startswith("float_") and (part := _PERCENT.fullmatch(value)):
            help_ = f"write it as a fraction: {float(part[1]) / 100:g}"
        elif kind.startswith(("tuple_", "list_")):
            parts = [part.strip() for part in value.split(",")]
            written = (part if _WORD.fullmatch(part) else repr(part) for part in parts)
            help_ = f"write it as a list: [{', '.join(written)}]"
    elif kind.startswith("int_") and isinstance(value, float) and value.is_integer():
        digits = f"write it in digits; counts are at most {LARGEST}"
        help_ = digits if abs(value) > LARGEST else f"write {int(value)}"
    elif kind.startswith("string_") and isinstance(value, int | float):
        help_ = f'put it in quotes: "{_describe_value(value)}"'
    return (help_,) if help_ else ()


def _suggest_section(path: KeyPath, section: Any, value: str | float) -> tuple[str, ...]:
    """Suggests the section that a bare name, number or true was meant to be, such as
    `estimator: {name: grpo}`, `kl: {coefficient: 0.001}` or `lora: {}`."""
    if not _is_section(section):
        return ()
    needed = {n: field for n, field in section.model_fields.items() if field.is_required()}
    if value is True and not needed:
        return (f"write it as `{path[-1]}: {{}}`, with its defaults",)
    known = list_yaml_keys(section)
    keys = [key for key in known if key in _SELECTORS] or [key for key in known if key == "path"]
    if not isinstance(value, str):
        keys = [n for n, f in needed.items() if _unwrap_type(f.annotation)[0] in (int, float)]
    if len(keys) != 1 or isinstance(value, bool):
        return ()
    return (f"write it as `{path[-1]}: {{{keys[0]}: {_shorten(str(value))}}}`",)
