"""The base classes of plugins, and the sections of an experiment whose model is chosen by name."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar, Union, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PrivateAttr,
    TypeAdapter,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema, to_json

from rlx.importing import ImportAbortedError, guard_import

API = 1
"""Version of the plugin API. rlx refuses a plugin that needs a newer version."""
LARGEST = 10**9
"""Largest count in an experiment. Sums and products of counts then fit the registry's columns and
the libraries' 64-bit integers."""
Count = Annotated[int, Field(le=LARGEST)]
"""A number of things, such as steps; a field adds its own lower bound. One with an upper bound of
its own is an `int`: of two bounds, pydantic keeps this one."""


class StrictModel(BaseModel):
    """Frozen model that rejects unknown keys, so that a typo never becomes a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Plugin(BaseModel):
    """A named component of an experiment; its fields are the options that YAML may set."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    api: ClassVar[int] = API
    needs: ClassVar[frozenset[str]] = frozenset()
    """Extra streams that this plugin reads, such as `values` or `reference_logprobs`."""
    nested: ClassVar[Mapping[str, str]] = {}
    """Options of type `Mapping[str, Use]` and the kind of plugin they hold, such as
    `{"sources": "reward"}`; `inner` returns those plugins."""

    _inner: dict[str, Mapping[str, "Plugin"]] = PrivateAttr(default_factory=dict)

    def inner(self, option: str) -> Mapping[str, Any]:
        """The plugins of a nested option, by their keys."""
        return self._inner[option]

    def with_inner(self, plugins: Mapping[str, Mapping[str, "Plugin"]]) -> Self:
        """Returns a copy that holds the plugins of its nested options."""
        holder = self.model_copy()
        holder._inner = dict(plugins)
        return holder

    def check(self) -> None:
        """Checks the files and packages that this plugin reads, before anything is recorded.

        Raises:
            OSError, ImportError: one is missing on this machine.
            ValueError: the data do not match the options.
        """
        for plugins in self._inner.values():
            for plugin in plugins.values():
                plugin.check()

    def warnings(self) -> Sequence[str]:
        """Warnings about its options, to show when the YAML is read, each with its reason."""
        return ()

    def data(self) -> Mapping[str, str]:
        """Digests, by name, of what this plugin reads besides its options. Each run stores them."""
        return {}


class Use(BaseModel):
    """A plugin named in another plugin's options; the keys besides `plugin` are its own options."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)

    plugin: str


def expand_path(path: str | Path) -> Path:
    """Returns a path with `~` or `~USER` at its start replaced by that user's home folder, if there
    is such a user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  (the method raises for unknown users)


PLUGIN_FAULT = "plugin_fault"
"""Type of the validation error where a model is installed and cannot be used."""
_Model = TypeVar("_Model", bound=Plugin)


@dataclass(frozen=True, eq=False)
class PluginSection(Generic[_Model]):
    """How a section such as `sampler: {engine: NAME, ...}` finds its model: one that rlx ships, or
    one that is imported through its entry point. As metadata of `Annotated[base, section]`, it
    validates.

    Attributes:
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
        """Returns the names of shipped models, then of other installed ones; imports nothing."""
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
        """Validates a section, plain values or a model that is valid already, by its model.

        Raises what `find_model` does, and ValidationError. `as_json` is strict but for lists, which
        JSON has for tuples.
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
        alone = [
            name
            for name, model in models.items()
            if not any(field.is_required() for field in model.model_fields.values())
        ]
        return {"anyOf": [{"enum": alone, "type": "string"}, written]}

    @property
    def _points(self) -> tuple[EntryPoint, ...]:
        return tuple(entry_points(group=self.group))

    def _find_models(self, names: Iterable[str]) -> dict[str, type[_Model]]:
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


Reading = Literal["scores", "turns", "token_rewards"]


class Estimator(Plugin):
    """Options of an advantage estimator.

    Attributes:
        implementation: "module:function". Called as `f(inputs, options)` with the
            `rlx.credit.CreditInputs` and this object, or with each option by its name. Returns
            `[B, T]` or a `rlx.credit.Credit`.
        reads: the rewards that it uses: "scores" (one per row, see `total_scores`), "turns"
            (the named rewards), or "token_rewards" (as placed, KL included).
    """

    implementation: ClassVar[str]
    reads: ClassVar[Reading] = "scores"

    def reading(self) -> Reading:
        """Like `reads`, for an estimator whose options decide it."""
        return self.reads

    def compares(self, turn: str) -> bool:
        """Whether a turn of this kind needs siblings to be compared with in order to learn."""
        return False

    def refuses_one(self, turn: str) -> bool:
        """Whether sampling only one turn of this kind per group is an error."""
        return False

    def get_ddof(self, turn: str) -> Literal[0, 1]:
        """Degrees of freedom of σ over a group of turns of this kind: 1, or 0 for a population."""
        return 1


class Mask(Plugin):
    """Options of a mask strategy.

    Attributes:
        implementation: "module:function". Called as `f(batch, options)` with the
            `rlx.batch.TokenBatch` and this object, or with each option by its name. Returns bool
            `[B, T]`.
        beyond_own: whether tokens that the policy did not write may learn.
    """

    implementation: ClassVar[str]
    beyond_own: ClassVar[bool] = False

    def reaches_beyond(self) -> bool:
        """Like `beyond_own`, for a mask whose options decide it."""
        return self.beyond_own


class Placement(Plugin):
    """Options of a placement: which tokens receive the rewards of turns and rollouts.

    Attributes:
        implementation: "module:function", called as that of an estimator. Returns the rewards on
            tokens, `[B, T]`.
        turn_reduce: whether the rewards of turns are summed or averaged, unless the YAML says.
        needs_turn_tokens: whether a turn's reward lies on tokens of that turn. If so, that of a
            turn without tokens is dropped or moved, as `on_missing_turn` says.
    """

    implementation: ClassVar[str]
    turn_reduce: ClassVar[Literal["sum", "mean"]] = "sum"
    needs_turn_tokens: ClassVar[bool] = True


class LauncherPlugin(StrictModel, Plugin):
    """The `runner.launcher` section of one launcher, selected by the field `kind`.

    A subclass declares `kind: Literal["NAME"] = "NAME"`, with the name of its entry point.

    Attributes:
        implementation: "module:Class" of a `rlx.launch.Launcher`, or a function that returns one;
            of a `rlx.launch.JobLauncher` if `submits_jobs`.
        submits_jobs: whether a job system starts each run's supervisor, and not `rlx submit`.
    """

    implementation: ClassVar[str]
    submits_jobs: ClassVar[bool] = False

    kind: str

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError if the launcher cannot place this number of ranks."""


class SamplerPlugin(StrictModel, Plugin):
    """The `sampler:` section of one engine, selected by the field `engine`.

    A subclass declares `engine: Literal["NAME"] = "NAME"`, with the name of its entry point.

    Attributes:
        implementation: "module:function". Called as `f(policy, settings, runner, device)` with the
            arguments of `rlx.sampler.open_sampler`; returns a context manager of a
            `rlx.sampler.SamplingEngine`.
        own_model: whether the engine computes log-probabilities by code of its own. If so, a run
            compares them with the learner's after each update, and stops if they differ.
        min_temperature: lowest temperature that the engine supports.
        holds_weights_apart: whether weights are copied once more on their way to the engine.
    """

    implementation: ClassVar[str]
    own_model: ClassVar[bool] = True
    min_temperature: ClassVar[float] = 0.0
    holds_weights_apart: ClassVar[bool] = False

    engine: str
    max_rows: Count = Field(512, ge=1)
    """Rows decoded together."""

    @property
    def needs_gpu(self) -> bool:
        return False

    def for_length(self, tokens: int) -> Self:
        """Returns the settings for an experiment whose dialogues have about this many tokens."""
        return self

    @property
    def cache_bytes(self) -> int | None:
        """Size of the KV cache; None if it grows with the rows that are decoded together."""
        return None

    @property
    def dialogues_at_once(self) -> int | None:
        """Dialogues that go through all their turns together, so that no more caches are kept from
        turn to turn; None: all of a step."""
        return None

    @property
    def max_drift(self) -> float | None:
        """Maximum mean difference, in nats, between the engine's log-probabilities and the
        learner's under the same weights; None: 0.001 in float32, 0.1 in bfloat16."""
        return None
