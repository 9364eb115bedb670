"""The JSON Schema of experiments for editors, with the meaning of every key."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, cast

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from rlx.plugin import Plugin
from rlx.spec.experiment import EstimatorUse, ExperimentSpec, MaskUse

_NAMES_PLUGINS = {
    "PluginUse": ("plugin", "task"),
    "TurnReward": ("plugin", "reward"),
    "GlobalReward": ("plugin", "reward"),
    "EnvironmentUse": ("plugin", "environment"),
    "MaskUse": ("strategy", "mask"),
    "PlacementUse": ("plugin", "placement"),
    "EstimatorUse": ("name", "estimator"),
}


_DEFAULTS = {
    "mask": MaskUse.model_fields["plugin"].default,
    "estimator": EstimatorUse.model_fields["plugin"].default,
}
"""Names of the plugins of sections that name none."""


Json = dict[str, Any]


_EXTENDS = "Another experiment, whose values count where this one has none: a path, or an example."


_CHANGES = "ChangesOf"
"""Prefix of the definitions for files that extend another one."""


class _DescribedFields(GenerateJsonSchema):
    """Describes each field by the docstring below it."""

    def model_schema(self, schema: core_schema.ModelSchema) -> Json:
        described, model = super().model_schema(schema), schema["cls"]
        meanings = read_field_meanings(model)
        for name, field in model.model_fields.items():
            if name in meanings:
                described["properties"][field.alias or name]["description"] = meanings[name]
        return described


def experiment_schema(plugins: Mapping[str, Mapping[str, type[Plugin] | None]]) -> Json:
    """Returns the schema (draft 2020-12), with field docstrings as descriptions.

    Args:
        plugins: installed plugins by kind and name. Their names become examples, not an enum, since
            users can install others; their options are checked where they are named. None stands
            for a plugin that cannot be imported: any options are taken.
    """
    schema: Json = ExperimentSpec.model_json_schema(schema_generator=_DescribedFields)
    kinds = dict.fromkeys(kind for _, kind in _NAMES_PLUGINS.values())
    options = {
        kind: dict(_list_option_schemas(kind, plugins.get(kind, {}), schema["$defs"]))
        for kind in kinds
    }
    for name, (key, kind) in _NAMES_PLUGINS.items():
        use = schema["$defs"][name]
        use["properties"][key]["examples"] = list(plugins.get(kind, ()))
        use["allOf"] = list(_list_conditions(kind, key, use["properties"], options[kind]))
    for kind, ours in options.items():
        named: Json = {"type": "string", "examples": list(plugins.get(kind, ()))}
        schema["$defs"][_name_nested_use(kind)] = {
            "type": "object",
            "properties": {"plugin": named},
            "required": ["plugin"],
            "allOf": list(_list_conditions(kind, "plugin", {"plugin": named}, ours)),
        }
    schema["properties"]["extends"] = {"type": "string", "description": _EXTENDS}
    whole = schema.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": whole | {f"{_CHANGES}{name}": _loosen(one) for name, one in whole.items()},
        "if": {"required": ["extends"]},
        "then": _loosen(schema),
        "else": schema,
    }


def _loosen(schema: Any) -> Any:
    """Returns the schema of changes: what the extended file may have is not required, and null may
    leave a value out."""
    if isinstance(schema, list):
        return [_loosen(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    loose: Json = {}
    for key, value in schema.items():
        if key == "properties":
            loose[key] = {name: _allow_null(field) for name, field in value.items()}
        elif key == "additionalProperties" and value is not True:
            loose[key] = _allow_null(value or {"type": "null"})
        elif key == "$ref":
            loose[key] = value.replace("#/$defs/", f"#/$defs/{_CHANGES}")
        elif key == "if":  # where a section names its plugin itself
            loose[key] = {**value, "required": list(value["properties"])}
        elif key not in ("required", "discriminator", "default"):
            loose["anyOf" if key == "oneOf" else key] = _loosen(value)
    return loose


def _allow_null(field: Any) -> Any:
    if isinstance(field, bool):
        return field
    described = {"description": field["description"]} if "description" in field else {}
    return {"anyOf": [_loosen(field), {"type": "null"}], **described}


def _list_option_schemas(
    kind: str, plugins: Mapping[str, type[Plugin] | None], definitions: Json
) -> Iterator[tuple[str, Json]]:
    """Yields the schema of each plugin's options, and adds the definitions that it refers to."""
    for name, model in plugins.items():
        if model is None:
            continue
        prefix = f"{kind}.{name}."  # plugins may have models of the same name
        try:
            schema = model.model_json_schema(
                ref_template=f"#/$defs/{prefix}{{model}}", schema_generator=_DescribedFields
            )
        except PydanticInvalidForJsonSchema:  # a type that only Python can check
            continue
        below = schema.pop("$defs", {})
        definitions |= {f"{prefix}{one}": definition for one, definition in below.items()}
        for option, inner in model.nested.items():
            use = {"$ref": f"#/$defs/{_name_nested_use(inner)}"}
            schema["properties"][option]["additionalProperties"] = use
        yield name, schema


def _name_nested_use(kind: str) -> str:
    return f"{kind}.nested"


def _list_conditions(
    kind: str, key: str, own: Mapping[str, Any], options: Mapping[str, Json]
) -> Iterator[Json]:
    """Yields, for each plugin, what its section may hold if it names the plugin.

    Args:
        kind: of the plugins.
        key: the key of the plugin's name.
        own: the section's own keys.
        options: schema of each plugin's options.
    """
    for name, schema in options.items():
        required = [] if name == _DEFAULTS.get(kind) else [key]
        yield {
            "if": {"properties": {key: {"const": name}}, "required": required},
            "then": {
                "description": schema.get("description", ""),
                "properties": {**dict.fromkeys(own, True), **schema.get("properties", {})},
                "required": schema.get("required", []),
                "additionalProperties": False,
            },
        }


def read_field_meanings(model: type[BaseModel]) -> dict[str, str]:
    """Returns the docstring below each field, by field name; empty for a model without source.

    Pydantic's `use_attribute_docstrings` would read the source at every import.
    """
    meanings: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError):  # created dynamically, so there is no source to read
            continue
        for statement, below in pairwise(cast(ast.ClassDef, tree).body):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(name)),
                    ast.Expr(value=ast.Constant(str(meaning))),
                ):
                    meanings[name] = " ".join(meaning.split())
    return meanings
