"""The functions that a record may name."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, get_args, get_type_hints

from torch import Tensor

from rlx.discovery import Kind, build_plugin, list_installed_plugins, load_plugin
from rlx.errors import SpecError
from rlx.plugin import Placement
from rlx.spec import PluginUse
from rlx.testing.golden.losses import INPUTS, OPTIONS, compute_policy_loss
from rlx.testing.golden.values import (
    build_credit_inputs,
    build_mask_batch,
    build_samples,
    parse_tensor,
    unpack_result,
)
from rlx.testing.promise import bind_subject

__all__ = ["GoldenFunction", "find_golden_function", "list_golden_functions"]

_ROOMS = ("rlx.credit", "rlx.kl", "rlx.loss", "rlx.evaluation", "rlx.probe", "rlx.reward")
_KINDS: tuple[Kind, ...] = ("estimator", "mask", "reward")
_PLAIN = {Tensor, int, float, bool, str, type(None), Placement}
"""Types of arguments that JSON can hold: placements by name."""


@dataclass(frozen=True)
class GoldenFunction:
    """A function that a record may name.

    Attributes:
        name: `ROOM.FUNCTION`, or `estimators.NAME`, `masks.NAME`, `rewards.NAME` with the name of
            the plugin.
        call: takes inputs and options, as JSON has them; returns outputs by name.
        summary: first line of its documentation.
        parameters: its inputs and options, as a signature.
    """

    name: str
    call: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    summary: str
    parameters: str


def list_golden_functions() -> Iterator[GoldenFunction]:
    """Yields the functions of the rooms, then the installed plugins. Imports them all."""
    yield from _list_room_functions().values()
    yield _POLICY_LOSS
    for name, (kind, plugin) in _list_plugins().items():
        yield _describe_plugin(name, kind, plugin)


def find_golden_function(name: str) -> GoldenFunction:
    """Finds a function by its name, in any case; `rlx.` may precede it, as in an import.

    Raises:
        SpecError: there is none; names the nearest.
        PluginFault: it is a plugin that cannot be imported.
    """
    rooms, plugins = _list_room_functions(), _list_plugins()
    named = {**rooms, _POLICY_LOSS.name: _POLICY_LOSS}
    folded = {known.casefold(): known for known in (*named, *plugins)}
    name = folded.get(name.casefold().removeprefix("rlx."), name)
    if name in named:
        return named[name]
    if name in plugins:
        return _describe_plugin(name, *plugins[name])
    known = [*named, *plugins]
    near = [other for other in known if other.partition(".")[2] == name.rpartition(".")[2]]
    near = near or get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`--functions` lists those that there are"
    raise SpecError(f"no function is called {name!r}: {hint}")


_POLICY_LOSS = GoldenFunction(
    "losses.policy",
    compute_policy_loss,
    (inspect.getdoc(compute_policy_loss) or "").partition("\n")[0],
    f"({', '.join((*INPUTS, '*', *OPTIONS))}, …)",
)


@lru_cache(maxsize=1)
def _list_room_functions() -> dict[str, GoldenFunction]:
    found: dict[str, GoldenFunction] = {}
    for room in _ROOMS:
        module = import_module(room)
        for short in module.__all__:
            function = getattr(module, short)
            if inspect.isfunction(function) and _takes_plain_values(function):
                name = f"{room.removeprefix('rlx.')}.{short}"
                found[name] = _describe_room_function(name, function)
    return found


def _list_plugins() -> dict[str, tuple[Kind, str]]:
    return {
        f"{kind}s.{found.name}": (kind, found.name)
        for kind in _KINDS
        for found in list_installed_plugins(kind)
    }


# Functions of rooms ------------------------------------------------------------------------------


def _takes_plain_values(function: Callable[..., Any]) -> bool:
    """Whether JSON can hold all of its arguments."""
    try:
        hints = get_type_hints(function)
    except NameError:  # it returns what only a type checker imports, such as a picture
        return False
    hints.pop("return", None)
    return all(_is_plain(hint) for hint in hints.values())


def _is_plain(hint: Any) -> bool:
    if getattr(hint, "__name__", "") == "Literal" or hint in _PLAIN or _is_array(hint):
        return True
    inner = get_args(hint)
    return bool(inner) and all(map(_is_plain, inner))


def _is_array(hint: Any) -> bool:
    return "numpy._typing" in str(hint)


def _describe_room_function(name: str, function: Callable[..., Any]) -> GoldenFunction:
    signature = inspect.signature(function)
    return GoldenFunction(
        name, partial(_call_room_function, function), _get_summary(function), str(_brief(signature))
    )


def _brief(signature: inspect.Signature) -> inspect.Signature:
    """The signature without types, which the documentation has."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return inspect.Signature(bare)


def _call_room_function(
    function: Callable[..., Any], inputs: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    hints = get_type_hints(function)
    arguments: dict[str, Any] = {}
    for name, value in (*inputs.items(), *options.items()):
        if name in arguments:
            raise SpecError(f"{name!r} is both an input and an option")
        if hints.get(name) is Placement:
            value = build_plugin(PluginUse(plugin=value), "placement")
        is_tensor = Tensor in (hints.get(name), *get_args(hints.get(name)))
        arguments[name] = parse_tensor(name, value) if is_tensor and value is not None else value
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise SpecError(str(error)) from error
    return unpack_result(function(**arguments))


# Plugins -----------------------------------------------------------------------------------------


def _describe_plugin(name: str, kind: Kind, plugin: str) -> GoldenFunction:
    cls = load_plugin(kind, plugin)
    argument, call = {
        "estimator": ("credit inputs", _call_estimator),
        "mask": ("a batch", _call_mask),
        "reward": ("a sample", _call_reward),
    }[kind]
    options = [
        f"{field.alias or option}={'…' if field.is_required() else repr(field.default)}"
        for option, field in cls.model_fields.items()
    ]
    listed = ", ".join((argument, *(["*", *options] if options else [])))

    def build_and_call(inputs: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        return call(build_plugin(PluginUse(plugin=plugin, **options), kind), inputs)

    return GoldenFunction(name, build_and_call, _get_summary(cls), f"({listed})")


def _call_estimator(plugin: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Advantages `[B, T]`, and what else the estimator gives."""
    result = bind_subject(plugin)(build_credit_inputs(inputs))
    return {"advantages": result.tolist()} if isinstance(result, Tensor) else unpack_result(result)


def _call_mask(plugin: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"mask": bind_subject(plugin)(build_mask_batch(inputs)).int().tolist()}


def _call_reward(plugin: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a score; lists of them for several samples."""
    samples = build_samples(inputs)
    if not isinstance(samples, tuple):
        return _unpack_verdict(plugin.score(samples))
    verdicts = [_unpack_verdict(verdict) for verdict in plugin.score(samples)]
    return {name: [v[name] for v in verdicts] for name in ("value", "reason", "parts")}


def _unpack_verdict(verdict: Any) -> dict[str, Any]:
    if verdict is None or isinstance(verdict, int | float):
        return {"value": verdict, "reason": None, "parts": {}}
    return unpack_result(verdict)


def _get_summary(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]
