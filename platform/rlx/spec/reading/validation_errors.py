"""Translates Pydantic validation errors into diagnostics for authors of YAML."""

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, to_json
from typing_extensions import TypeAliasType

from rlx.plugin import PLUGIN_FAULT, PluginSection
from rlx.spec.base import KeyPath, get_at_path, has_path, list_yaml_keys
from rlx.spec.reading.diagnostics import Diagnostic, build_error, did_you_mean, format_key_path

_Model = TypeVar("_Model", bound=BaseModel)
_SELECTORS = frozenset({"engine", "kind", "name", "plugin", "strategy", "type"})
"""Keys that select what their section is."""


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
        data: the plain values that `model` refused.
        at: path of `data` in the file.
        more_keys: keys that are allowed at the top level in addition to the model's own.
    """
    found = [(one, *_find_path(one, data)) for one in error.errors(include_url=False)]
    # Where an error is inside of one member of a union, the other members were not meant.
    meant_unions = {union for _, path, union in found if union is not None and path != union}
    explainer = _Explainer(model, data, at, tuple(more_keys))
    unknown: list[Diagnostic] = []
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for one, path, union in found:
        kind = one["type"]
        if kind == "extra_forbidden":
            unknown.append(explainer.explain_unknown_key(path))
        elif kind == "too_short" and len(one["input"]) >= one["ctx"]["min_length"]:
            continue  # a consequence of invalid items
        elif path != union or union not in meant_unions:
            by_path.setdefault(path, []).append(one)
    meant_keys = {(*fault.path[:-1], fault.meant) for fault in unknown}
    others = (explainer.explain(path, errors) for path, errors in by_path.items())
    return [*unknown, *(d for d in others if d.kind != "missing_key" or d.path not in meant_keys)]


def _find_path(error: ErrorDetails, data: Any) -> tuple[KeyPath, KeyPath | None]:
    """Returns an error's path in the data, and that of the last union on the way.

    Pydantic's location also has the names of the members of unions, which no data have.
    """
    path: KeyPath = ()
    union = None
    steps = error["loc"]
    for step in steps[:-1] if error["type"] == "missing" else steps:
        if has_path(data, (*path, step)):
            path = (*path, step)
        else:
            union = path
    return (*path, steps[-1]) if error["type"] == "missing" else path, union


# Expected types ----------------------------------------------------------------------------------


def _is_model(expected: Any) -> bool:
    return isinstance(expected, type) and issubclass(expected, BaseModel)


def _list_types(expected: Any, metadata: Sequence[Any] = ()) -> list[Any]:
    """Returns the types that an annotation stands for, without aliases, unions and None."""
    for section in metadata:
        if isinstance(section, PluginSection):
            return list(section.list_imported().values())
    if isinstance(expected, TypeAliasType):
        return _list_types(expected.__value__)
    if get_origin(expected) is Annotated:
        return _list_types(expected.__origin__, expected.__metadata__)
    if get_origin(expected) in (Union, types.UnionType):
        return [found for member in get_args(expected) for found in _list_types(member)]
    return [] if expected is types.NoneType else [expected]


def _list_types_below(expected: Any, step: str | int) -> list[Any]:
    """Returns the types of what a value of a type holds under a key or an index."""
    if _is_model(expected):
        fields = expected.model_fields.items()
        found = next((field for name, field in fields if step in (name, field.alias)), None)
        return _list_types(found.annotation, found.metadata) if found else []
    members, origin = get_args(expected), get_origin(expected)
    if not members or not isinstance(origin, type):
        return []
    if issubclass(origin, Mapping):
        return _list_types(members[1])
    return _list_types(members[int(step) if _count_items(expected) else 0])


def _count_items(expected: Any) -> int:
    """Returns the length of a tuple type; 0 if it is not fixed."""
    members = get_args(expected)
    return len(members) if get_origin(expected) is tuple and Ellipsis not in members else 0


def _read_tag(model: type[BaseModel]) -> tuple[str, str]:
    """Returns the key and the value by which a section selects a model; empty if none does."""
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1:
            return name, get_args(field.annotation)[0]
    return "", ""


# Faults ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Explainer:
    model: type[BaseModel]
    data: Any
    at: KeyPath
    more_keys: tuple[str, ...]

    def find_types(self, path: KeyPath) -> list[Any]:
        """Returns the types that are expected at a path, the one that the data select first."""
        found: list[Any] = [self.model]
        for end, step in enumerate(path, 1):
            found = next(filter(None, (_list_types_below(one, step) for one in found)), [])
            value = get_at_path(self.data, path[:end])
            chosen = value.items() if isinstance(value, dict) else ()
            found.sort(key=lambda one: not (_is_model(one) and _read_tag(one) in chosen))
        return found

    def find_models(self, path: KeyPath) -> list[type[BaseModel]]:
        return [one for one in self.find_types(path) if _is_model(one)]

    def explain_unknown_key(self, path: KeyPath) -> Diagnostic:
        """Suggests the key that was meant: the section's own selector, the closest key, or the only
        one of that name in another section."""
        key, models = str(path[-1]), self.find_models(path[:-1])
        valid = list_yaml_keys(models[0]) if models else ()
        valid += self.more_keys if len(path) == 1 else ()
        help_ = f"valid keys here: {', '.join(valid)}" if valid else "no keys are allowed here"
        where = (*self.at, *path)
        message = f"unknown key '{format_key_path(where)}'"
        for one in models[1:]:
            if key in list_yaml_keys(one):
                owner = f"'{key}' belongs to '{_read_tag(one)[1]}'"
                return build_error(where, message, owner, help_, kind="unknown_key")
        selectors = _SELECTORS.intersection(valid)
        is_chosen = key not in _SELECTORS or selectors & get_at_path(self.data, path[:-1]).keys()
        near = "" if is_chosen or len(selectors) > 1 else "".join(selectors)
        near = near or did_you_mean(key, valid) or ""
        elsewhere = [
            f"{name}.{key}"
            for name in list_yaml_keys(self.model)
            if any(key in list_yaml_keys(one) for one in self.find_models((name,)))
        ]
        if near or (len(elsewhere) == 1 and key not in _SELECTORS):
            help_ = f"did you mean '{near or elsewhere[0]}'?"
        return build_error(where, message, help_, kind="unknown_key", meant=near)

    def explain(self, path: KeyPath, errors: Sequence[ErrorDetails]) -> Diagnostic:
        """Explains the errors of one value: those of all members of a union, if it fits none."""
        error, where, value = errors[0], (*self.at, *path), errors[0]["input"]
        kind, label = error["type"], format_key_path(where)
        expected = self.find_types(path)
        count = max(map(_count_items, expected), default=0)
        if kind == "missing" and isinstance(path[-1], str):
            return self._explain_missing_key(path)
        if kind == "missing":
            return self.explain(path[:-1], [{**error, "type": "too_long"}])
        if kind in ("value_error", "assertion_error"):
            return self._explain_raised_error(str(error["ctx"]["error"]), path)
        if kind.startswith("union_tag_"):
            return self._explain_tag(path, error)
        if kind == PLUGIN_FAULT:
            key = _read_tag(self.find_models(path)[0])[0]
            return build_error((*where, key), error["msg"], kind="plugin")
        if count and kind == "too_long":
            message = f"'{label}' must be a list of {count} values, not of {len(value)}"
            return build_error(where, message, kind="value")
        wanted = " or ".join(dict.fromkeys(filter(None, map(_describe_expected, errors))))
        if not wanted:
            message = f"'{label}': {error['msg'][:1].lower()}{error['msg'][1:]}"
            return build_error(where, message, kind="value")
        if count and wanted == "a list":
            wanted = f"a list of {count} values"
        expectations = " ".join(str(one.get("ctx", {}).get("expected")) for one in errors)
        help_ = _suggest_fix(value, re.findall(r"'([^']*)'", expectations), kind)
        if wanted == "a mapping" and isinstance(value, str | int | float):
            models = [one for one in expected if _is_model(one)]
            help_ = _suggest_section(where, models[0], value) if models else ""
        if where == ("seed",) and isinstance(value, list):
            help_ = "a file has one seed: `rlx submit --seeds 0..4` runs it with several"
        return _build_value_error(where, wanted, value, help_)

    def _explain_missing_key(self, path: KeyPath) -> Diagnostic:
        key, written = str(path[-1]), get_at_path(self.data, path[:-1])
        valid = {key for one in self.find_models(path[:-1])[:1] for key in list_yaml_keys(one)}
        near = did_you_mean(key, (one for one in written if one not in valid))
        help_ = f"should '{near}' be '{key}'?" if near else ""
        where = (*self.at, *path)
        section = f"in '{format_key_path(where[:-1])}'" if where[:-1] else "at the top of the file"
        return build_error(where, f"missing key '{key}' {section}", help_, kind="missing_key")

    def _explain_tag(self, path: KeyPath, error: ErrorDetails) -> Diagnostic:
        """Explains the name that selects a section's kind, where it is unknown or missing."""
        key = error["ctx"]["discriminator"].strip("'")
        named = re.findall(r"[^', ]+", error["ctx"].get("expected_tags", ""))
        names = named or [_read_tag(one)[1] for one in self.find_models(path)]
        wanted = " or ".join(f"'{name}'" for name in names)
        where, value = (*self.at, *path), get_at_path(self.data, path)
        if isinstance(value, dict):
            if key not in value:
                message = f"missing key '{key}' in '{format_key_path(where)}'"
                return build_error((*where, key), message, f"it is {wanted}", kind="missing_key")
            where, value = (*where, key), value[key]
        fault = _build_value_error(where, wanted, value, _suggest_fix(value, names, ""))
        return replace(fault, meant=did_you_mean(str(value), names) or "")

    def _explain_raised_error(self, text: str, path: KeyPath) -> Diagnostic:
        """Explains an exception that a validator raised, at the key that its text begins with."""
        word = re.match(r"[A-Za-z_][\w.-]*", text)
        steps = tuple(int(s) if s.isdigit() else s for s in word[0].split(".")) if word else ()
        where = (*self.at, *path)
        message = f"'{format_key_path(where)}': {text}" if where else text
        if has_path(self.data, (*path, *steps)):
            where = (*where, *steps)
        return build_error(where, message)


# Words -------------------------------------------------------------------------------------------

_WORDS = {
    "Input should be ": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "a valid dictionary or object to extract fields from": "a mapping",
    "an object": "a mapping",
}
"""Pydantic's words, and those of YAML."""
_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, '.', '_' and '-', a letter or digit first",
    r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$": (
        "at most 40 letters, digits, '_' and '-', a letter or digit first"
    ),
    r"^[A-Za-z_][A-Za-z0-9_-]*$": "letters, digits, '_' and '-', a letter or '_' first",
    r"^[a-z][a-z0-9_]*$": "lowercase letters, digits and '_', a letter first",
    r"^[a-z][a-z0-9-]*$": "lowercase letters, digits and '-', a letter first",
}
"""What texts are made of, by their form."""
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?")


def _build_value_error(path: KeyPath, wanted: str, value: Any, help_: str) -> Diagnostic:
    message = f"'{format_key_path(path)}' must be {wanted}, not {_describe_value(value)}"
    return build_error(path, message, help_, kind="value")


def _describe_value(value: Any) -> str:
    """Describes a value for an error message: `text 'x'`, `3`, `a list`."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"text {_shorten(value)!r}"
    if isinstance(value, list | dict):
        what = "list" if isinstance(value, list) else "mapping"
        return f"a {what}" if value else f"an empty {what}"
    return _shorten(str(value))


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def _describe_expected(error: ErrorDetails) -> str:
    """Describes the expected value; empty if only Pydantic's own message describes it."""
    text = error["msg"]
    if error["type"] == "string_pattern_mismatch":
        pattern = error["ctx"]["pattern"]
        words = _PATTERNS.get(pattern)
        return f"made of {words}" if words else f"of the form {pattern}"
    if found := re.match(r"\w+ should have ((at \w+ )?\d+ \w+)", text):
        return f"of {found[1]}"
    if not text.startswith("Input should be "):
        return ""
    for word, plain in _WORDS.items():
        text = text.replace(word, plain)
    return text


def _suggest_fix(value: Any, names: Sequence[str], kind: str) -> str:
    """Suggests how to mend a value, which may be one of `names`; empty if nothing is known."""
    if value is None:
        return "give it a value, or drop the key"
    if kind == "bool_type" and str(value).lower() in ("yes", "no", "on", "off", "0", "1"):
        return "only true and false are booleans in YAML 1.2"
    if kind == "string_type" and isinstance(value, int | float):
        return f'put it in quotes: "{_describe_value(value)}"'
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}" if value < 1e15 else ""
    if not isinstance(value, str):
        return ""
    if near := did_you_mean(value, names):
        return f"did you mean '{near}'?"
    if value.startswith("${"):
        return "values are not taken from the environment: use --set"
    if kind in ("int_type", "float_type") and _NUMBER.fullmatch(value):
        return f"write it without quotes: {value}"
    if kind in ("tuple_type", "list_type"):
        parts = [part.strip() for part in value.split(",")]
        words = (part if re.fullmatch(r"[\w-]+", part) else repr(part) for part in parts)
        return f"write it as a list: [{', '.join(words)}]"
    return ""


def _suggest_section(path: KeyPath, model: type[BaseModel], value: str | float) -> str:
    """Suggests the section that a bare name, number or true was meant to be, such as
    `estimator: {name: grpo}`, `kl: {coefficient: 0.001}` or `lora: {}`."""
    needed = [name for name, field in model.model_fields.items() if field.is_required()]
    if isinstance(value, bool):
        return f"write it as `{path[-1]}: {{}}`" if value and not needed else ""
    keys = [key for key in list_yaml_keys(model) if key in _SELECTORS or key == "path"]
    keys = keys if isinstance(value, str) else needed
    written = f"{path[-1]}: {{{keys[0]}: {_shorten(str(value))}}}" if len(keys) == 1 else ""
    return f"write it as `{written}`" if written else ""
