"""The JSON Schema of experiments for editors, with the meaning of every key."""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from rlx.spec.experiment import PLUGIN_USES, ExperimentSpec

_EXTENDS = "Another experiment, whose values count where this one has none: a path, or an example."


class _DescribedFields(GenerateJsonSchema):
    """Describes each field by the docstring below it."""

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        described, model = super().model_schema(schema), schema["cls"]
        meanings = read_field_meanings(model)
        for name, field in model.model_fields.items():
            if name in meanings:
                described["properties"][field.alias or name]["description"] = meanings[name]
        return described


def experiment_schema(plugins: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """Returns the schema (draft 2020-12), with field docstrings as descriptions.

    A file may extend another, so no key is required, and null may leave a value out. Names of
    plugins by kind become examples, not an enum, since users can install others.
    """
    schema = ExperimentSpec.model_json_schema(schema_generator=_DescribedFields)
    for use, kind in PLUGIN_USES.items():
        key = use.model_fields["plugin"].alias or "plugin"
        named = schema["$defs"][use.__name__]["properties"][key]
        named["examples"] = list(plugins.get(kind, ()))
    schema["properties"]["extends"] = {"type": "string", "description": _EXTENDS}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_loosen(schema)}


def _loosen(schema: Any) -> Any:
    """Returns the schema with no key required and with null for any."""
    if isinstance(schema, list):
        return [_loosen(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    loose: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            loose[key] = {
                name: {
                    **{note: field[note] for note in ("description", "examples") if note in field},
                    "anyOf": [_loosen(field), {"type": "null"}],
                }
                for name, field in value.items()
            }
        elif key == "additionalProperties" and value is not True:
            loose[key] = {"anyOf": [_loosen(value), {"type": "null"}]}
        elif key not in ("required", "discriminator", "default"):
            loose["anyOf" if key == "oneOf" else key] = _loosen(value)
    return loose


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
