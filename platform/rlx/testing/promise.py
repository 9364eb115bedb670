"""Checks of every kind of plugin, and those of samplers, launchers and trackers.

A check takes a plugin's class, which then gets its default options, or an instance. A broken
promise raises AssertionError with the reason; a check that does not apply, `unittest.SkipTest`.
"""

import atexit
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import SkipTest

from pydantic import ValidationError
from pydantic_core import to_json

from rlx.discovery import bind_implementation, build_plugin, import_implementation
from rlx.errors import RlxError
from rlx.plugin import Environment, Plugin
from rlx.reward import JobOutcome, RewardPool, host_environment
from rlx.rollout import EnvironmentHost
from rlx.spec import EnvironmentRolloutSpec, EnvironmentUse, PluginUse, RunnerSpec
from rlx.spec.reading import explain_validation_error

HEAVY = ("torch", "transformers", "vllm", "deepspeed", "mlflow")
"""Modules that only a plugin's implementation may import: `rlx validate` imports every plugin."""
Subject = type[Plugin] | Plugin

_SECONDS = 30.0
_PROBE = """
import json, sys
sys.path[:], module, name = json.loads(sys.argv[1])
import rlx.plugin
before, raised = set(sys.modules), None
try:
    getattr(__import__(module, fromlist=["_"]), name)
except BaseException as error:
    raised = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps([sorted(set(sys.modules) - before), raised]))
"""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What importing a module did in a process that had imported only `rlx.plugin`: the modules
    that it loaded, the exception that it raised, and how the process ended or exceeded its time."""

    modules: frozenset[str] = frozenset()
    raised: str | None = None
    died: str | None = None


def first_import(module: str, name: str) -> ImportReport:
    """Imports a module in a fresh interpreter and looks up `name` in it."""
    arguments = json.dumps([sys.path, module, name])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
        modules, raised = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return ImportReport(died=f"did not end in {_SECONDS:g} s")
    except (ValueError, IndexError):
        return ImportReport(died=f"ended its process with exit code {done.returncode}")
    return ImportReport(frozenset(modules), raised)


_kept: dict[tuple[str, ...], RewardPool] = {}
"""The pool that is reused while `sys.path`, its key, is unchanged: workers are slow to start."""


@contextmanager
def open_worker(*, fresh: bool = False) -> Iterator[RewardPool]:
    """One worker as runs have them, with a deadline and a memory cap; newly started or kept."""
    path = tuple(sys.path)
    if fresh or path not in _kept:
        pool = RewardPool(workers=1, memory_mb=RunnerSpec().reward_memory_mb)
        if not fresh:
            _end_kept()
            _kept[path] = pool
    else:
        pool = _kept[path]
    try:
        yield pool
    finally:
        if fresh:
            pool.close()


@atexit.register
def _end_kept() -> None:
    for path in list(_kept):
        _kept.pop(path).close()


@dataclass(frozen=True, slots=True)
class _FunctionCall:
    """Calls a function in a worker, as a reward is called."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    name: str
    deadline: float = _SECONDS

    def run(self) -> JobOutcome:
        return JobOutcome(value=self.function(*self.arguments))


def run_in_worker(function: Callable[..., Any], *arguments: Any, fresh: bool = False) -> Any:
    """The result of a picklable `function(*arguments)` in a worker, `fresh` or kept.

    Raises:
        AssertionError: it raised, hung, or ended its process; the message says which.
    """
    call: Any = _FunctionCall(function, arguments, type(arguments[0]).__name__)
    with open_worker(fresh=fresh) as pool:
        (outcome,) = pool.score([call])
    assert outcome.fault is None, outcome.fault
    return outcome.value


@contextmanager
def open_environment_host(
    environment: Environment, *, fresh: bool = False
) -> Iterator[EnvironmentHost]:
    with open_worker(fresh=fresh) as pool:
        rollout = EnvironmentRolloutSpec(environment=EnvironmentUse(plugin="environment"))
        limits = rollout.resolve_limits(replayable=environment.replayable)
        yield host_environment(environment, pool, limits)


@dataclass(frozen=True, slots=True)
class PromiseCheck:
    """A named check; `help` says how to fix a plugin that breaks it. Calling it with a plugin
    raises AssertionError if the promise is broken, and unittest.SkipTest if it does not apply."""

    name: str
    help: str
    run: Callable[[Any], None]

    def __str__(self) -> str:
        return self.name

    def __call__(self, subject: Any) -> None:
        self.run(subject)


class Promises:
    """The promises of a kind of plugin, in order. Calling it decorates the function of a check."""

    def __init__(self) -> None:
        self._own: list[tuple[str, str, Callable[..., None]]] = []

    def __call__(self, name: str, help: str) -> Callable[[Any], Any]:
        def add(run: Callable[..., None]) -> Callable[..., None]:
            self._own.append((name, help, run))
            return run

        return add

    def build_checks(self, call: Callable[[Any, Any], None]) -> tuple[PromiseCheck, ...]:
        """The checks of every kind of plugin, then these, whose functions `call(function, subject)`
        runs."""
        own = (PromiseCheck(name, help_, partial(call, run)) for name, help_, run in self._own)
        return (*_COMMON_CHECKS, *own)


def run_checks(checks: Iterable[PromiseCheck], subject: Any) -> None:
    """Runs checks in order, up to the first broken promise, with whose name the error begins."""
    for check in checks:
        try:
            check(subject)
        except SkipTest:
            continue
        except AssertionError as error:
            raise AssertionError(f"{check}: {error}") from error


def shorten_text(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def build_subject_plugin(subject: Subject, options: Mapping[str, Any] | None = None) -> Any:
    """An instance of a plugin class with these options, parsed as strictly as YAML; an instance
    unchanged if there are none.

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
                key: build_plugin(PluginUse(**use.model_dump()), kind)  # type: ignore[arg-type]
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


def build_first_plugin(subject: Subject) -> Any:
    """The instance itself, or the class with the options of its first example."""
    examples = getattr(subject, "examples", ())
    return build_subject_plugin(
        subject, examples[0].options if examples and isinstance(subject, type) else None
    )


def bind_subject(subject: Any) -> Callable[..., Any]:
    """The implementation that a plugin names, with its options bound; a function unchanged."""
    if not is_plugin(subject):
        function: Callable[..., Any] = subject
        return function
    try:
        return bind_implementation(build_subject_plugin(subject))
    except RlxError as error:
        raise AssertionError(str(error)) from error


def is_plugin(subject: Any) -> bool:
    return issubclass(subject if isinstance(subject, type) else type(subject), Plugin)


def _get_plugin_class(subject: Subject) -> type[Plugin]:
    if not is_plugin(subject):
        raise SkipTest("it is a function, not a plugin")
    return subject if isinstance(subject, type) else type(subject)


def required_options(cls: type[Plugin]) -> list[str]:
    """Options without a default, by their YAML names."""
    return [f.alias or name for name, f in cls.model_fields.items() if f.is_required()]


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


def _check_json_options(subject: Subject) -> None:
    _get_plugin_class(subject)
    plugin = build_first_plugin(subject)
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


def _check_implementation(subject: Subject) -> None:
    try:
        import_implementation(build_subject_plugin(subject).implementation)
    except RlxError as error:
        raise AssertionError(str(error)) from error


_COMMON_CHECKS = (
    PromiseCheck(
        "imports no heavy package",
        f"import {', '.join(HEAVY)} in functions, or in the implementation",
        _check_import,
    ),
    PromiseCheck(
        "has a docstring", "begin the class or the function with a docstring", _check_docstring
    ),
    PromiseCheck(
        "keeps its options through JSON",
        "annotate options with plain types, and give defaults of just those types",
        _check_json_options,
    ),
)
_SETTINGS_CHECKS = (
    *_COMMON_CHECKS,
    PromiseCheck(
        "names an implementation that can be imported",
        "set `implementation` to 'module:function', or 'module:Class'",
        _check_implementation,
    ),
)


def check_settings(plugin: Any) -> None:
    """Raises AssertionError, naming the broken promise, unless a `SamplerPlugin`, `LauncherPlugin`
    or `TrackerPlugin` keeps them all."""
    run_checks(_SETTINGS_CHECKS, plugin)


def settings_checks() -> tuple[PromiseCheck, ...]:
    return _SETTINGS_CHECKS


check_sampler = check_launcher = check_tracker = check_settings
sampler_checks = launcher_checks = tracker_checks = settings_checks
