"""Sections of an experiment whose model is chosen by name, among installed ones.

A section such as `sampler: {engine: NAME, ...}` is validated by the model that NAME stands for. The
models that rlx ships are known; any other is imported through its entry point, when it is named.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Generic, TypeVar, Union, get_args

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import (
    CoreSchema,
    PydanticCustomError,
    PydanticKnownError,
    core_schema,
    to_json,
)

from rlx.importing import ImportAbortedError, guard_import
from rlx.plugin.base import API, Plugin

PLUGIN_FAULT = "plugin_fault"
"""Type of the validation error where a model is installed and cannot be used."""


_Model = TypeVar("_Model", bound=Plugin)


@dataclass(frozen=True, eq=False)
class PluginSection(Generic[_Model]):
    """How a section finds its model. As metadata of `Annotated[base, section]`, it validates.

    Attributes:
        base: class of every model of the section.
        group: entry-point group.
        kind: kind of plugin, for messages.
        key: YAML key of the name; a `Literal` field of each model.
        shipped: models that rlx ships. They also are entry points; their names cannot be taken.
        default: name if the YAML gives none; "" if it must.
        allows_name: whether a bare name stands for the section with this name.
    """

    base: type[_Model]
    group: str
    kind: str
    key: str
    shipped: Mapping[str, type[_Model]]
    default: str = ""
    allows_name: bool = False

    def list_names(self) -> tuple[str, ...]:
        """Returns the names of shipped models, then of other installed ones. Imports nothing."""
        others = {point.name for point in self._points} - self.shipped.keys()
        return (*self.shipped, *sorted(others))

    def find_model(self, value: Any) -> type[_Model]:
        """Returns the model of a section's value.

        Raises:
            PydanticKnownError: the value is no mapping, or names no installed model.
            PydanticCustomError: the model that it names cannot be used.
        """
        value = self._expand_name(value)
        if not isinstance(value, Mapping):
            raise PydanticKnownError("model_attributes_type")
        if self.key not in value and not self.default:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": f"'{self.key}'"})
        name = value.get(self.key, self.default)
        if name in tuple(self.shipped):
            return self.shipped[name]
        points = [point for point in self._points if point.name == name]
        if not points:
            context = {
                "discriminator": f"'{self.key}'",
                "tag": str(name),
                "expected_tags": ", ".join(self.list_names()),
            }
            raise PydanticKnownError("union_tag_invalid", context)
        if len(points) > 1:
            values = " and ".join(f"'{point.value}'" for point in points)
            raise self._build_fault(name, f"is provided twice, by {values}; uninstall one")
        return self._load_model(points[0])

    def get_model(self, value: Any) -> type[_Model] | None:
        """Like `find_model`, with None for a value that validation refuses."""
        try:
            return self.find_model(value)
        except (PydanticKnownError, PydanticCustomError):
            return None

    def list_imported(self) -> dict[str, type[_Model]]:
        """Returns the shipped models, and valid others whose modules are imported, by name."""
        return self._find_models(
            point.name for point in self._points if point.module in sys.modules
        )

    def validate_section(self, value: Any, *, as_json: bool = False) -> _Model:
        """Validates a section by its model.

        Args:
            value: plain values, or a model that is valid already.
            as_json: whether the values come from JSON, which has lists for tuples; strict.

        Raises:
            ValidationError: the model refuses the values.
            PydanticKnownError, PydanticCustomError: as `find_model`.
        """
        if isinstance(value, self.base):
            return value
        model = self.find_model(value)
        value = {self.key: self.default, **self._expand_name(value)}
        if as_json:
            return model.model_validate_json(to_json(value), strict=True)
        return model.model_validate(value)

    def _expand_name(self, value: Any) -> Any:
        return {self.key: value} if self.allows_name and isinstance(value, str) else value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def validate(value: Any, info: core_schema.ValidationInfo) -> _Model:
            return self.validate_section(value, as_json=info.mode == "json")

        return core_schema.with_info_plain_validator_function(validate)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema of every installed model that can be imported."""
        models = self._find_models(self.list_names())
        members = tuple(models.values())
        union: Any = Annotated[Union[members], Field(discriminator=self.key)]  # noqa: UP007
        written = handler(TypeAdapter(union).core_schema)
        for name, member in zip(models, written["oneOf"], strict=True):
            if name != self.default:
                definition = handler.resolve_ref_schema(member)
                definition["properties"][self.key].pop("default", None)
                required = definition.get("required", [])
                definition["required"] = list(dict.fromkeys([self.key, *required]))
        if not self.allows_name:
            return written
        alone = [name for name, model in models.items() if not _list_required_fields(model)]
        return {"anyOf": [{"enum": alone, "type": "string"}, written]}

    @property
    def _points(self) -> tuple[EntryPoint, ...]:
        return tuple(entry_points(group=self.group))

    def _find_models(self, names: Iterable[str]) -> dict[str, type[_Model]]:
        """Returns the shipped models and those of other names, without those that are at fault."""
        models = dict(self.shipped)
        for name in names:  # where one is at fault, an experiment that names it says why
            if (model := self.get_model({self.key: name})) is not None:
                models[name] = model
        return models

    def _load_model(self, point: EntryPoint) -> type[_Model]:
        try:
            with guard_import():
                model = point.load()
        except (Exception, SystemExit, ImportAbortedError) as error:
            what = f"failed to import: {type(error).__name__}: {error}"
            raise self._build_fault(point.name, what, point) from error
        if not (isinstance(model, type) and issubclass(model, self.base)):
            what = f"is invalid: it does not derive from rlx.plugin.{self.base.__name__}"
            raise self._build_fault(point.name, what, point)
        if get_args(model.model_fields[self.key].annotation) != (point.name,):
            literal = f"`{self.key}: Literal['{point.name}'] = '{point.name}'`"
            raise self._build_fault(point.name, f"is invalid: it does not set {literal}", point)
        if model.api > API:
            what = f"needs rlx plugin API {model.api}, and this is API {API}"
            raise self._build_fault(point.name, what, point)
        return model

    def _build_fault(
        self, name: str, what: str, point: EntryPoint | None = None
    ) -> PydanticCustomError:
        message = f"{self.kind} plugin '{name}' {what}"
        origin = f" (entry point '{point.value}')" if point else ""
        return PydanticCustomError(PLUGIN_FAULT, "{message}", {"message": message + origin})


def _list_required_fields(model: type[Plugin]) -> list[str]:
    return [name for name, field in model.model_fields.items() if field.is_required()]
