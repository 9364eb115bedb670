"""Generates the JSON Schema of experiment files, for editors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from rlx.spec.base import StrictModel
from rlx.spec.experiment import ExperimentSpec
from rlx.spec.field_docs import read_field_meanings

__all__ = ["experiment_schema"]

_NAMES_PLUGINS = {
    "PluginUse": ("plugin", "task"),
    "TurnReward": ("plugin", "reward"),
    "GlobalReward": ("plugin", "reward"),
    "EnvironmentUse": ("plugin", "environment"),
    "MaskUse": ("strategy", "mask"),
    "PlacementUse": ("plugin", "placement"),
    "EstimatorUse": ("name", "estimator"),
}


def experiment_schema(plugins: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns the schema (draft 2020-12), with field docstrings as descriptions.

    Args:
        plugins: names of installed plugins by kind. They become examples, not an enum, since users
            can install others.
    """
    schema: dict[str, Any] = ExperimentSpec.model_json_schema()
    models = {model.__name__: model for model in _list_subclasses(StrictModel)}
    definitions = {ExperimentSpec.__name__: schema, **schema["$defs"]}
    for name, definition in definitions.items():
        model = models.get(name)
        if model is None:  # below the settings of another distribution's plugin
            continue
        meanings = read_field_meanings(model)
        for field, info in model.model_fields.items():
            if field in meanings:
                definition["properties"][info.alias or field]["description"] = meanings[field]
    for name, (key, kind) in _NAMES_PLUGINS.items():
        definitions[name]["properties"][key]["examples"] = list(plugins.get(kind, ()))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _list_subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for below in model.__subclasses__():
        yield below
        yield from _list_subclasses(below)
