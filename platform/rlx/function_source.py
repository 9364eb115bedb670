"""The source of a function or class that Python gives as a plugin, complete in itself.

A run outlives the process that submits it, so it needs text: the definition, what it uses of its
own module, and imports of what is installed.
"""

import __future__

import ast
import dis
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, ModuleType
from typing import Any

from rlx.errors import SpecError

_FUTURE = "from __future__"
_ADVICE = "put it in a file, and name the file: plugin: rewards.py:{name}"


def collect_source(plugin: Callable[..., Any]) -> str:
    """Returns Python source that defines a function or class, and what it uses.

    Functions, classes and plain values of its module are copied; what is installed is imported.

    Raises:
        SpecError: it has no source of its own, or uses what cannot be written as source.
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
        return SpecError(f"{self._plugin} {why}; {_ADVICE.format(name=self._plugin)}")

    def add_definition(self, name: str, value: Any) -> None:
        """Adds a function or class after what it uses."""
        self._known[name] = value
        defined = _get_definition(value)
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
        for module in sorted(set(_list_imported_modules(code))):
            if not _is_installed(module):
                raise self._refuse(f"imports {module}, which is not installed")
        for used in dict.fromkeys(_list_global_names(code)):
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


def _get_definition(value: Any) -> Any:
    """A function or class; for a class that `rlx.plugin.reward` has made, its function."""
    return vars(value).get("reward_function", value) if inspect.isclass(value) else value


def _list_imported_modules(code: CodeType) -> Iterator[str]:
    """Modules that a definition itself imports, when it is called."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_imported_modules(constant)


def _get_names(value: Any) -> Mapping[str, Any]:
    """What the names in a definition stand for: those of its module, and of its closure."""
    if inspect.isclass(value):
        return vars(sys.modules[value.__module__])
    inner = inspect.unwrap(value)
    return {**inner.__globals__, **inspect.getclosurevars(inner).nonlocals}


def _list_global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_global_names(constant)


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
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([sys.executable, "-P", "-c", find, top], check=False).returncode == 0
