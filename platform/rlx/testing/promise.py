"""The checks that apply to every kind of plugin, and those of samplers and launchers.

Call a check with a plugin: either its class, which then gets its default options, or an instance.
A broken promise raises AssertionError with the reason. A check that does not apply raises
`unittest.SkipTest`, which test runners understand.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import SkipTest

from pydantic import ValidationError
from pydantic_core import to_json

from rlx.discovery import bind_implementation, build_plugin, import_implementation
from rlx.errors import RlxError
from rlx.plugin import Plugin
from rlx.spec import PluginUse
from rlx.spec.reading import explain_validation_error
from rlx.testing.processes import first_import

HEAVY = ("torch", "transformers", "vllm", "deepspeed", "mlflow")
"""Modules that only a plugin's implementation may import: `rlx validate` imports every plugin."""
Subject = type[Plugin] | Plugin


class FindsToJudge(tuple[str, ...]):
    """Lines about what a check found and only the plugin's author can judge: the promise is neither
    kept nor broken."""


@dataclass(frozen=True, slots=True)
class PromiseCheck:
    """A named check. `str()` is the name; calling it with a plugin runs it.

    Attributes:
        name: the promise.
        help: how to fix a plugin that breaks it.
        run: raises AssertionError or SkipTest; may return lines to show, about a promise that is
            kept, or as `FindsToJudge`.
    """

    name: str
    help: str
    run: Callable[[Any], Sequence[str] | None]

    def __str__(self) -> str:
        return self.name

    def __call__(self, subject: Any) -> Sequence[str]:
        """Runs the check, and returns lines to show about what it found.

        Raises:
            AssertionError: the promise is broken; the message says how.
            unittest.SkipTest: the check does not apply; the message says why.
        """
        return self.run(subject) or ()


def run_checks(checks: Iterable[PromiseCheck], subject: Any) -> None:
    """Runs checks in order, skipping those that do not apply.

    Raises:
        AssertionError: at the first broken promise; the message begins with its name.
    """
    for check in checks:
        try:
            check(subject)
        except SkipTest:
            continue
        except AssertionError as error:
            raise AssertionError(f"{check}: {error}") from error


def build_subject_plugin(subject: Subject, options: Mapping[str, Any] | None = None) -> Any:
    """Returns an instance of a plugin class with these options, parsed as strictly as YAML.

    Args:
        subject: the class; an instance is returned unchanged if `options` is None.
        options: options as written in YAML.

    Raises:
        AssertionError: options are invalid or missing, or the class lacks a method.
    """
    if isinstance(subject, Plugin) and options is None:
        return subject
    cls = _get_plugin_class(subject)
    values = dict(options or {})
    assert not cls.__abstractmethods__, f"has no {', '.join(sorted(cls.__abstractmethods__))}"
    lacking = [f"'{option}'" for option in required_options(cls) if option not in values]
    assert not lacking, f"needs {', '.join(lacking)} among its options"
    try:
        plugin = cls.model_validate_json(to_json(values), strict=True)
        inner = {
            option: {
                key: build_plugin(_build_plugin_use(use), kind)  # type: ignore[arg-type]
                for key, use in getattr(plugin, option).items()
            }
            for option, kind in cls.nested.items()
        }
    except ValidationError as error:
        reasons = "; ".join(d.message for d in explain_validation_error(error, cls, values))
        raise AssertionError(f"cannot be built with the options {values}: {reasons}") from None
    except RlxError as error:
        raise AssertionError(f"cannot be built with the options {values}: {error}") from error
    return plugin.with_inner(inner) if inner else plugin


def _build_plugin_use(use: Any) -> PluginUse:
    return PluginUse(**use.model_dump())


def bind_subject(subject: Any) -> Callable[..., Any]:
    """Returns the implementation that a plugin names, with its options bound; a function unchanged.

    Raises:
        AssertionError: see `build_subject_plugin`; or the implementation cannot be imported.
    """
    if not is_plugin(subject):
        function: Callable[..., Any] = subject
        return function
    try:
        return bind_implementation(build_subject_plugin(subject))
    except RlxError as error:
        raise AssertionError(str(error)) from error


def is_plugin(subject: Any) -> bool:
    """Whether it is a plugin, as class or instance, and not a function."""
    return issubclass(subject if isinstance(subject, type) else type(subject), Plugin)


def _get_plugin_class(subject: Subject) -> type[Plugin]:
    if not is_plugin(subject):
        raise SkipTest("it is a function, not a plugin")
    return subject if isinstance(subject, type) else type(subject)


def common_checks(
    make_one: Callable[[Any], Any] = build_subject_plugin,
) -> tuple[PromiseCheck, ...]:
    """Returns the checks that apply to every kind of plugin.

    Args:
        make_one: builds an instance of a plugin class.
    """
    return (
        PromiseCheck(
            "imports no heavy package",
            f"import {', '.join(HEAVY)} in functions, or in the implementation",
            _check_import,
        ),
        PromiseCheck(
            "has a docstring",
            "begin the class or the function with a docstring",
            _check_docstring,
        ),
        PromiseCheck(
            "keeps its options through JSON",
            "annotate options with plain types, and give defaults of just those types",
            partial(_check_json_options, make_one=make_one),
        ),
    )


def implementation_check(form: str) -> PromiseCheck:
    """Returns the check that what a plugin names in `implementation` can be imported."""
    return PromiseCheck(
        "names an implementation that can be imported",
        f"set `implementation` to '{form}'",
        _check_implementation,
    )


def _check_implementation(subject: Subject) -> None:
    try:
        import_implementation(build_subject_plugin(subject).implementation)
    except RlxError as error:
        raise AssertionError(str(error)) from error


def _check_import(subject: Subject) -> None:
    cls = _get_plugin_class(subject)
    module, name = cls.__module__, cls.__qualname__
    report = first_import(module, name.partition(".")[0])
    fault = report.raised or report.died
    assert fault is None, f"importing {module} in a fresh process: {fault}"
    heavy = [package for package in HEAVY if package in report.modules]
    assert not heavy, f"importing {module} imports {', '.join(heavy)}"


def _check_docstring(subject: Subject) -> None:
    cls = _get_plugin_class(subject)
    assert (cls.__doc__ or "").strip(), f"{cls.__name__} has no docstring"


def _check_json_options(subject: Subject, make_one: Callable[[Any], Any]) -> None:
    _get_plugin_class(subject)
    plugin = make_one(subject)
    written = plugin.model_dump_json(by_alias=True, warnings=False)
    try:
        again = type(plugin).model_validate_json(written, strict=True)
    except ValidationError as error:
        reasons = "; ".join(
            d.message for d in explain_validation_error(error, type(plugin), json.loads(written))
        )
        raise AssertionError(f"{written} cannot be read back: {reasons}") from None
    one, other = (p.model_dump(warnings=False) for p in (plugin, again))
    assert one == other, f"{written} is read back as {again!r}"


def required_options(cls: type[Plugin]) -> list[str]:
    """Options without a default, by their YAML names."""
    return [f.alias or name for name, f in cls.model_fields.items() if f.is_required()]


def check_sampler(plugin: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `SamplerPlugin` keeps them all."""
    run_checks(sampler_checks(), plugin)


def sampler_checks() -> tuple[PromiseCheck, ...]:
    """Returns the checks for the settings of sampling engines."""
    return (*common_checks(), implementation_check("module:function"))


def check_launcher(plugin: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `LauncherPlugin` keeps them
    all."""
    run_checks(launcher_checks(), plugin)


def launcher_checks() -> tuple[PromiseCheck, ...]:
    """Returns the checks for the settings of launchers."""
    return (*common_checks(), implementation_check("module:Class"))


def check_tracker(plugin: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `TrackerPlugin` keeps them all."""
    run_checks(tracker_checks(), plugin)


def tracker_checks() -> tuple[PromiseCheck, ...]:
    """Returns the checks for the settings of trackers."""
    return (*common_checks(), implementation_check("module:Class"))
