"""Plugins in a Python file beside an experiment: `plugin: rewards.py:brevity`.

The source of a function that Python gives as a plugin is kept like such a file.

Once an experiment has been read, it names the file by its digest:
`rewards.py@0123456789abcdef:brevity`. An edited file is therefore another plugin, hence another
run. The text is kept under that digest: in this machine's cache when an experiment is read, and
below RLX_HOME when a run is submitted, which goes on with the text that it began with.

Every process imports a kept file as a module of this one, `rlx.plugin_files.of_0123456789abcdef`.
A function there need not know rlx: `adapt_function` takes the signatures of rlx, TRL and verl.
"""

import __future__

import ast
import dis
import hashlib
import importlib
import inspect
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

from rlx import plugin as api
from rlx.errors import EnvironmentFault, SpecError
from rlx.home import format_path, get_rlx_home, locate_cache
from rlx.importing import finds_module
from rlx.plugin import Plugin, Reward, Sample, Score
from rlx.text import escape_unprintable

_WRITTEN = re.compile(r"(?P<path>[^:]+\.py):(?P<name>[A-Za-z_]\w*)")
_KEPT = re.compile(r"(?P<file>[^/:@]+\.py)@(?P<digest>[0-9a-f]{16}):(?P<name>[A-Za-z_]\w*)")
_NAMING_KEYS = ("plugin", "function")
"""Keys of an experiment whose values may name Python files."""
_NAMING_LISTS = ("tools",)
"""Keys of lists whose items may."""
__path__: list[str] = []
"""Folders of the modules of this one."""


def _list_folders() -> tuple[Path, Path]:
    """The folder of runs, and that of this machine's cache."""
    folders = get_rlx_home() / "plugins", locate_cache() / "plugins"
    __path__[:] = map(str, folders)
    return folders


_list_folders()  # for a process that unpickles a plugin before it calls anything here


@dataclass(frozen=True, slots=True)
class KeptPlugin:
    """A function or class in a kept file, by the name of the file that it was written in and the
    first 16 hex digits of the SHA-256 of its text."""

    file: str
    digest: str
    name: str

    @classmethod
    def parse(cls, reference: str) -> "KeptPlugin | None":
        """The plugin that an experiment names, `FILE@DIGEST:NAME`; None if it is no kept file's."""
        found = _KEPT.fullmatch(reference)
        return cls(**found.groupdict()) if found else None

    def __str__(self) -> str:
        return f"{self.file}@{self.digest}:{self.name}"

    @property
    def module(self) -> str:
        """Name of the module that holds it."""
        return f"{__name__}.of_{self.digest}"

    @property
    def stored_name(self) -> str:
        """Name of the file that holds its text."""
        return f"of_{self.digest}.py"

    def locate(self) -> Path:
        """The file that holds its text; raises `EnvironmentFault` if it is gone."""
        places = [folder / self.stored_name for folder in _list_folders()]
        for place in places:
            if place.is_file() and _hash_text(place.read_bytes()) == self.digest:
                __path__.sort(key=lambda folder: folder != str(place.parent))  # it comes first
                return place
        raise EnvironmentFault(f"the kept text of {self.file} is gone or was changed: {places[0]}")

    def load(self) -> Any:
        """Imports the file and returns what it defines: a plugin's class, or a function adapted;
        raises whatever the file does."""
        offered = self.load_object()
        return adapt_function(offered, self) if inspect.isfunction(offered) else offered

    def load_object(self) -> Any:
        """Imports the file and returns the object of that name as it is."""
        self.locate()
        module = importlib.import_module(self.module)
        if not hasattr(module, self.name):
            own = [
                name
                for name, value in vars(module).items()
                if callable(value) and getattr(value, "__module__", None) == self.module
            ]
            defines = ", ".join(own) or "no function and no class"
            raise AttributeError(f"{self.file} defines no {self.name}; it defines {defines}")
        return getattr(module, self.name)


def load_function(name: str) -> Callable[..., Any]:
    """Imports a function by `module:name`, or that of a kept file; raises whatever its module
    does."""
    kept = KeptPlugin.parse(name)
    module, _, attribute = name.partition(":")
    function = kept.load_object() if kept else getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def find_failed_line(error: BaseException) -> int | None:
    """The line of a kept file in which an exception was raised, or passed last; None if in none."""
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith(f"{__name__}.")
    ]
    return lines[-1] if lines else None


def anchor_file(written: str, folder: Path) -> str:
    """Returns `PATH.py:NAME`, where the path is relative to a folder, with an absolute path; any
    other name as it is."""
    found = _WRITTEN.fullmatch(written)
    if found is None:
        return written
    path = folder / os.path.expanduser(found["path"])  # noqa: PTH111  (the method may raise)
    return f"{path.absolute()}:{found['name']}"


def keep_plugin_file(written: str) -> str:
    """Keeps the file that `PATH.py:NAME` names, and returns the name by which it is kept; any other
    name is returned as it is. Raises `SpecError` if there is no such file."""
    found = _WRITTEN.fullmatch(written)
    if found is None:
        return written
    path = Path(os.path.expanduser(found["path"]))  # noqa: PTH111  (the method may raise)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        name = escape_unprintable(format_path(path))
        raise SpecError(f"the plugin's file {name} cannot be read: {why}") from error
    return _keep_text(path.name, found["name"], text)


def keep_plugin_source(plugin: Callable[..., Any]) -> str:
    """Keeps the source that `collect_source` returns as a file; returns the name by which it is
    kept."""
    text = collect_source(plugin)
    return _keep_text(f"{plugin.__name__}.py", plugin.__name__, text)


def _keep_text(file: str, name: str, text: str) -> str:
    kept = KeptPlugin(file, _hash_text(text.encode()), name)
    _write_text(_list_folders()[1] / kept.stored_name, text)
    return str(kept)


def keep_for_runs(tree: Any) -> None:
    """Keeps the files that the values of an experiment name below RLX_HOME."""
    for _, name in list_plugin_names(tree):
        if kept := KeptPlugin.parse(name):
            text = kept.locate().read_bytes().decode()
            _write_text(_list_folders()[0] / kept.stored_name, text)


def list_plugin_files(tree: Any) -> list[str]:
    """Paths of the Python files that the values of an experiment name as plugins."""
    found = (_WRITTEN.fullmatch(name) for _, name in list_plugin_names(tree))
    return [one["path"] for one in found if one]


def list_plugin_names(
    node: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yields the name of every plugin, tool, and agent's function among the values of an
    experiment, each after its path. Dotted keys, as in `phases[].set`, count by their last part."""
    if isinstance(node, str) and names_plugin(path):
        yield path, node
    elif isinstance(node, dict | list):
        for key, each in node.items() if isinstance(node, dict) else enumerate(node):
            yield from list_plugin_names(each, (*path, key))


def names_plugin(path: Sequence[str | int]) -> bool:
    """Whether the value at a path of an experiment may name a Python file."""
    is_item = len(path) > 1 and isinstance(path[-1], int)
    key = str(path[-2] if is_item else path[-1]).rpartition(".")[2] if path else ""
    return key in (_NAMING_LISTS if is_item else _NAMING_KEYS)


def _hash_text(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _write_text(file: Path, text: str) -> None:
    """Writes a file at once, unless it is there as it should be."""
    try:
        if file.exists() and file.read_bytes() == text.encode():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_bytes(text.encode())
        aside.replace(file)
    except OSError as error:
        raise EnvironmentFault(f"{file} cannot be written: {error.strerror}") from error
    importlib.invalidate_caches()


# Functions that know nothing of rlx --------------------------------------------------------------


def adapt_function(function: Callable[..., Any], kept: KeptPlugin) -> type[Reward]:
    """Makes a reward of a function, by the names of its parameters.

    With `completions` it is called as by TRL, with `solution_str` and `ground_truth` as by verl,
    else as `rlx.plugin.reward` says.
    """
    names = inspect.signature(function).parameters
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{kept.name} is asynchronous, and rlx calls rewards one after the other")
    if "completions" in names:
        base: type[Reward] = _TrlReward
    elif {"solution_str", "ground_truth"} <= names.keys():
        base = _VerlReward
    else:
        made = api.reward(function)
        base = type(made.__name__, (_KeptReward, made), {"__module__": made.__module__})
    attributes = {
        "__module__": kept.module,
        "__doc__": function.__doc__,
        "function": staticmethod(function),
        "kept": kept,
    }
    return type(kept.name, (base,), attributes)


def _rebuild(kept: KeptPlugin, options: Mapping[str, Any]) -> Plugin:
    cls: type[Plugin] = kept.load()
    return cls.model_validate(options)


class _KeptReward(Reward):
    """A reward whose class is made from a function, so that pickle cannot find it by its name."""

    kept: ClassVar[KeptPlugin]
    function: ClassVar[Callable[..., Any]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.kept, self.model_dump())

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Calls the function with those of the arguments that it takes."""
        asked = inspect.signature(self.function).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in asked.values())
        return self.function(**{n: v for n, v in arguments.items() if takes_all or n in asked})


class _TrlReward(_KeptReward):
    """Called with lists, one entry per completion of a prompt: `completions`, the columns, and
    `prompts`, which is TRL's name of the column `prompt`."""

    scope = "group"

    messages: bool = False
    """Completions are lists with one message, as TRL gives them for conversational data."""

    def check_problem(self, problem: Mapping[str, Any]) -> None:
        """Refuses problems without a column that the function asks for."""
        for name, parameter in inspect.signature(self.function).parameters.items():
            is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            is_needed = parameter.default is parameter.empty and not is_variadic
            if is_needed and name not in ("completions", *_name_columns(problem)):
                of = ", TRL's name of the column 'prompt'" if name == "prompts" else ""
                raise ValueError(f"{self.kept.name} asks for the column {name!r}{of}")

    def score(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        """The list that the function returns."""
        self.check_problem(samples[0].problem)
        texts: list[Any] = [sample.response for sample in samples]
        if self.messages:
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        columns = {
            name: [sample.problem[column] for sample in samples]
            for name, column in _name_columns(samples[0].problem).items()
        }
        scores = self.call({**columns, "completions": texts})
        if not isinstance(scores, Iterable):
            raise TypeError(f"{self.kept.name} returned {scores!r}, not a score per completion")
        return [None if score is None else float(score) for score in scores]


def _name_columns(problem: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a problem by the names under which TRL gives them."""
    names = {name: name for name in problem}
    return names if "prompts" in names or "prompt" not in names else names | {"prompts": "prompt"}


class _VerlReward(_KeptReward):
    """Called with `data_source`, `solution_str`, `ground_truth` and `extra_info`."""

    def check_problem(self, problem: Mapping[str, Any]) -> None:
        """Refuses problems without a ground truth."""
        if _get_ground_truth(problem) is None:
            raise ValueError(
                f"{self.kept.name} compares with `ground_truth`, or `reward_model.ground_truth`"
            )

    def score(self, sample: Sample) -> Score:
        """The number that the function returns, or the `score` of its mapping."""
        self.check_problem(sample.problem)
        found = self.call(
            {
                "data_source": sample.problem.get("data_source"),
                "solution_str": sample.response,
                "ground_truth": _get_ground_truth(sample.problem),
                "extra_info": sample.problem.get("extra_info") or {},
            }
        )
        if not isinstance(found, Mapping):
            return Score(float(found))
        parts = {
            name: float(value)
            for name, value in found.items()
            if name != "score" and isinstance(value, int | float)
        }
        return Score(float(found["score"]), parts=parts)


def _get_ground_truth(problem: Mapping[str, Any]) -> Any:
    nested = problem.get("reward_model")
    nested = nested if isinstance(nested, Mapping) else {}
    return nested.get("ground_truth", problem.get("ground_truth"))


# Functions and classes of a notebook -------------------------------------------------------------

_FUTURE = "from __future__"


def collect_source(plugin: Callable[..., Any]) -> str:
    """Returns Python source that defines a function or class, and what it uses.

    Functions, classes and plain values of its module are copied; what is installed is imported.
    Raises `SpecError` where something has no source.
    """
    collector = _Collector(plugin)
    collector.add_definition(plugin.__name__, plugin)
    imports = sorted(collector.imports, key=lambda line: (not line.startswith(_FUTURE), line))
    return "\n\n".join(["".join(imports), *collector.definitions]).lstrip("\n")


class _Collector:
    """Collects definitions, each after those that it uses, and imports."""

    def __init__(self, plugin: Callable[..., Any]) -> None:
        is_defined = inspect.isfunction(plugin) or inspect.isclass(plugin)
        self._plugin = getattr(plugin, "__name__", None) or repr(plugin)
        if not is_defined or self._plugin == "<lambda>":
            what = "a lambda" if is_defined else f"a {type(plugin).__name__}"
            raise SpecError(f"{what} has no definition that could be kept: write a function")
        self._known: dict[str, Any] = {}
        self.imports: set[str] = set()
        self.definitions: list[str] = []

    def _refuse(self, why: str) -> SpecError:
        advice = f"put it in a file, and name the file: plugin: rewards.py:{self._plugin}"
        return SpecError(f"{self._plugin} {why}; {advice}")

    def add_definition(self, name: str, value: Any) -> None:
        """Adds a function or class after what it uses."""
        self._known[name] = value
        is_class = inspect.isclass(value)
        # Of a class that `rlx.plugin.reward` has made, its function.
        defined = vars(value).get("reward_function", value) if is_class else value
        try:
            source = textwrap.dedent(inspect.getsource(defined))
        except (OSError, TypeError):
            whose = "" if name == self._plugin else f"uses {name}, which "
            raise self._refuse(f"{whose}has no source that Python could read") from None
        there, flags = _get_names(defined), 0
        if there.get("annotations") is __future__.annotations:  # they are not evaluated
            self.imports.add(f"{_FUTURE} import annotations\n")
            flags = __future__.annotations.compiler_flag
        try:
            code = compile(source, name, "exec", flags, dont_inherit=True)
        except SyntaxError:  # a lambda, or its file was edited since it was imported
            raise self._refuse(f"has no definition of its own: {source.splitlines()[0]}") from None
        for module in sorted(set(_list_names(code, "IMPORT_NAME"))):
            if not _is_installed(module):
                raise self._refuse(f"imports {module}, which is not installed")
        for used in dict.fromkeys(_list_names(code, "LOAD_GLOBAL", "LOAD_NAME")):
            if used in there and not used.startswith("__"):
                self._add(used, there[used])
        if value.__name__ != name:
            source += f"\n\n{name} = {value.__name__}\n"
        self.definitions.append(source)

    def _add(self, name: str, value: Any) -> None:
        if name in self._known:
            if self._known[name] is not value:
                raise self._refuse(f"uses two things called {name}")
            return
        self._known[name] = value
        if isinstance(value, ModuleType):
            if not _is_installed(value.__name__):
                raise self._refuse(f"uses the module {value.__name__}, which is not installed")
            self.imports.add(f"import {value.__name__} as {name}\n")
        elif found := _find_import(name, value):
            self.imports.add(f"from {found[0]} import {found[1]} as {name}\n")
        elif getattr(value, "__name__", "") == "<lambda>":
            raise self._refuse(f"uses {name}, a lambda: define it by def")
        elif inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)):
            self.add_definition(name, value)
        elif isinstance(value, re.Pattern):
            self.imports.add("import re as _re\n")
            self.definitions.append(f"{name} = _re.compile({value.pattern!r}, {value.flags})\n")
        elif _is_plain(value):
            self.definitions.append(f"{name} = {value!r}\n")
        else:
            kind = type(value).__name__
            raise self._refuse(f"uses {name}, a value of type {kind} that cannot be written out")


def _find_import(name: str, value: Any) -> tuple[str, str] | None:
    """The installed module that holds a value, and its name there; None if there is none."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or not _is_installed(module):
        return None
    names = (getattr(value, "__name__", None), getattr(value, "_name", None), name)
    held = vars(sys.modules.get(module, object))
    return next(((module, one) for one in names if one in held and held[one] is value), None)


def _list_names(code: CodeType, *operations: str) -> Iterator[str]:
    """Yields the names to which these operations of a definition, and of those in it, apply."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in operations:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_names(constant, *operations)


def _get_names(value: Any) -> Mapping[str, Any]:
    """What the names in a definition stand for: those of its module, and of its closure."""
    if inspect.isclass(value):
        return vars(sys.modules[value.__module__])
    inner = inspect.unwrap(value)
    return {**inner.__globals__, **inspect.getclosurevars(inner).nonlocals}


def _is_plain(value: Any) -> bool:
    """Whether a value's text is the value."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


@lru_cache
def _is_installed(module: str) -> bool:
    """Whether a process that starts elsewhere finds a module."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "__main__":
        return top != "__main__"
    return finds_module(sys.executable, top)
