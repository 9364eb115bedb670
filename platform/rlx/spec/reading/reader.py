"""Reads experiments and suites, with the files that they extend and the overrides of a command.

A file may extend another, and change some of its values. Mappings are merged key by key. Lists and
all other values are replaced, and so is a section that names another plugin, since the former one's
options would not fit it. Each value keeps its place in the file that it comes from, so that errors
and `rlx validate --values` can name it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any, TypeVar

from pydantic import BaseModel

from rlx.errors import EnvironmentFault, SpecError
from rlx.plugin_files import (
    anchor_file,
    keep_plugin_file,
    keep_plugin_source,
    list_plugin_names,
    names_plugin,
)
from rlx.spec.base import KeyPath, get_at_path
from rlx.spec.experiment import ExperimentSpec
from rlx.spec.reading.diagnostics import (
    Diagnostic,
    InvalidSpec,
    SourceLocation,
    build_error,
    build_refusal,
    format_key_path,
    suggest_name,
)
from rlx.spec.reading.validation_errors import validate_values
from rlx.spec.reading.yaml_source import (
    Node,
    YamlDocument,
    locate_diagnostic,
    parse_yaml_document,
    read_text,
)
from rlx.spec.training import SuiteSpec
from rlx.text import escape_unprintable

_Model = TypeVar("_Model", bound=BaseModel)
_EXTENDS = "extends"
_IN_PYTHON = "<python>"
_OVERRIDE = "<override>"
_SELECTORS = ("plugin", "kind", "strategy", "engine")
"""Keys that select what the other keys of their section mean; in `estimator`, `name` does."""


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """An experiment as it was read.

    Attributes:
        path: the file, or `<python>`.
        document: values and source locations as written.
        spec: the spec, with the overrides.
    """

    path: Path
    document: YamlDocument
    spec: ExperimentSpec

    @property
    def origins(self) -> dict[str, str]:
        """Maps the dotted path of every value to `default`, `FILE:line` or `--set`; a list of plain
        values counts as one value."""
        origins = {}
        for at in _list_leaf_paths(self.spec.dump_resolved(), ()):
            node = self.document.find(at)
            if node is None and at[-1] == "kind":  # of a bare kind, such as `launcher: slurm`
                above = self.document.find(at[:-1])
                node = above if above and isinstance(above.value, str) else None
            origin = f"{node.position.file}:{node.position.line}" if node else "default"
            is_override = node is not None and node.position.file == _OVERRIDE
            origins[format_key_path(at)] = "--set" if is_override else origin
        return origins


def list_leaf_values(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields every value of an experiment with its dotted path; a list of plain values is one."""
    for path in _list_leaf_paths(tree, ()):
        yield format_key_path(path), get_at_path(tree, path)


def _list_leaf_paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _list_leaf_paths(below, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _list_leaf_paths(item, (*path, index))
    else:
        yield path


def read_document(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> YamlDocument:
    """Reads an experiment and those that it extends, and applies the overrides, without validation.

    Args:
        source: a file, or its content; paths in the latter are relative to the current folder.
        overrides: `path.to.key=value`.

    Raises:
        InvalidSpec: a file is not YAML that rlx accepts, or is a suite, a value cannot be written
            as YAML, or an override cannot be applied.
        SpecError: the file cannot be opened.
    """
    if not isinstance(source, Path):
        document = _extend(_write_document(source), Path(), [])
    elif not source.exists() and source.stem in find_examples():
        raise SpecError(
            f"cannot read {escape_unprintable(str(source))}: there is no such file, but an "
            f"example: rlx new --from {source.stem}"
        )
    else:
        document = _extend(_read_mapping(source), source.parent, [source])
    keys = document.root.value
    if "sets" in keys and not {"task", "rollout", "rewards"} & keys.keys():
        message = "this is a suite of held-out sets, not an experiment"
        help_ = f"evaluate a run with it: rlx eval RUN --suite {document.file}"
        raise _build_refusal(document, ("sets",), message, help_, kind="syntax")
    return apply_overrides(document, overrides)


def read_own_values(path: Path) -> YamlDocument | None:
    """Parses what a file changes of the file that it extends; None if it extends none.

    Raises:
        InvalidSpec, SpecError: as `read_document`.
    """
    document = _read_mapping(path)
    return document if document.root.value.pop(_EXTENDS, None) else None


def read_suite(path: Path) -> SuiteSpec:
    """Reads and validates one suite, without the values that its sets change.

    Raises:
        InvalidSpec: lists every error in the file.
        SpecError: the file cannot be opened.
    """
    document = _read_mapping(path)
    return validate_document_values(SuiteSpec, document.tree, document)


def validate_document_values(model: type[_Model], values: Any, document: YamlDocument) -> _Model:
    """Returns values of a document as a model.

    Raises:
        InvalidSpec: lists every error in them.
    """
    found, faults = validate_values(model, values)
    if found is None:
        located = [locate_diagnostic(fault, document) for fault in faults]
        raise build_refusal(located, document.file)
    return found


def _read_mapping(path: Path, name: str | None = None) -> YamlDocument:
    """Parses a file with a mapping at its top, whose name in messages may be another than its path,
    without the file that it extends."""
    document = parse_yaml_document(read_text(path), name or str(path))
    if not isinstance(document.root.value, dict):
        empty = document.root.value is None
        message = "the file is empty" if empty else "the file is not a mapping at its top"
        help_ = "an experiment starts with `name: ...`"
        raise build_refusal([build_error((), message, help_, kind="syntax")], document.file)
    return document


def _write_document(content: Mapping[str, Any]) -> YamlDocument:
    """Writes the content of an experiment that was given in Python, as JSON, which is YAML.

    Values are what YAML has, paths, and Pydantic objects. A plugin may be a function or a class,
    whose source is kept.
    """
    faults: list[Diagnostic] = []

    def write(value: Any, path: KeyPath) -> Any:
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json")
        if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
            return {str(key): write(each, (*path, str(key))) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [write(each, (*path, n)) for n, each in enumerate(value)]
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, PurePath):
            return str(value)
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of NumPy or PyTorch
            return value.item()
        message = f"a value of type {type(value).__name__} cannot be written as YAML"
        try:
            if names_plugin(path) and callable(value):
                return keep_plugin_source(value)
        except (SpecError, EnvironmentFault) as error:
            message = str(error)
        faults.append(build_error(path, f"'{format_key_path(path)}': {message}", kind="value"))
        return None

    try:
        tree = write(content, ())
    except RecursionError:
        message = "the mapping contains itself, or is nested too deeply"
        faults = [build_error((), message, kind="value")]
    if faults:
        raise build_refusal(faults, _IN_PYTHON)
    return parse_yaml_document(json.dumps(tree, indent=2, ensure_ascii=False), _IN_PYTHON)


def _build_refusal(
    document: YamlDocument, path: KeyPath, message: str, *helps: str, kind: Any = "file"
) -> InvalidSpec:
    fault = build_error(path, message, *helps, kind=kind)
    return build_refusal([locate_diagnostic(fault, document)], document.file)


# Files that extend others ------------------------------------------------------------------------


def _extend(document: YamlDocument, folder: Path, chain: Sequence[Path]) -> YamlDocument:
    """Merges a document onto its base.

    Args:
        folder: what the document's paths are relative to.
        chain: the files from the first to the document's own, each extended by the one before it;
            a document that was given in Python has none.
    """
    _rename_plugins(document, lambda name, _: anchor_file(name, folder))
    if _EXTENDS not in document.root.value:
        return document
    path, name = _find_base(document, folder, chain)
    if any(path.samefile(one) for one in chain):
        circle = " → ".join(escape_unprintable(str(one)) for one in (*chain, path))
        message = f"files extend each other in a circle: {circle}"
        raise _build_refusal(document, (_EXTENDS,), message)
    try:
        base = _extend(_read_mapping(path, name), path.parent, [*chain, path])
    except InvalidSpec as error:  # the file that the user named is the one that cannot be run
        where = f" ({escape_unprintable(name)})"
        faults = [
            fault if fault.position else replace(fault, message=fault.message + where)
            for fault in error.diagnostics
        ]
        raise build_refusal(faults, document.file) from None
    except SpecError as error:
        raise _build_refusal(document, (_EXTENDS,), str(error)) from error
    del document.root.value[_EXTENDS]
    nulls: list[KeyPath] = []
    root = _merge(base.root, document.root, (), nulls)
    merged = replace(document, root=root, bases=((base.file, base.text), *base.bases))
    refused = validate_values(ExperimentSpec, root.tree)[1] if nulls else []
    for at in {fault.path for fault in refused}.intersection(nulls):
        section = merged.find(at[:-1])
        assert section is not None
        del section.value[at[-1]]
    return merged


def _find_base(document: YamlDocument, folder: Path, chain: Sequence[Path]) -> tuple[Path, str]:
    """Returns the file that a document extends, and its name in messages."""
    named = document.root.value[_EXTENDS].value
    if not isinstance(named, str) or not named or "\0" in named:
        message = "'extends' must be the path of one file"
        raise _build_refusal(document, (_EXTENDS,), message, kind="value")
    there = folder / named
    if os.path.isfile(there):  # noqa: PTH113  (false also for names that are no file's)
        return there, os.path.normpath(there)
    examples = find_examples()
    if named in examples:
        return examples[named], f"example {named}"
    siblings = [one.name for one in folder.glob("*.y*ml") if one not in chain[-1:]]
    raise _build_refusal(
        document,
        (_EXTENDS,),
        f"'extends': there is no file and no example {escape_unprintable(named)!r}",
        suggest_name(named, [*siblings, *examples], "a path is relative to this file's folder"),
    )


def _merge(base: Node, own: Node, path: KeyPath, nulls: list[KeyPath]) -> Node:
    """Returns the values of `own` over those of `base`; adds paths where null stands against a
    value of the base to `nulls`."""
    if not (isinstance(base.value, dict) and isinstance(own.value, dict)):
        if own.value is None and base.value is not None:
            nulls.append(path)
        return own
    for key in (*_SELECTORS, "name") if path == ("estimator",) else _SELECTORS:
        one, other = base.value.get(key), own.value.get(key)
        if one and other and isinstance(one.value, str) and one.value != other.value:
            return own
    merged = {
        key: _merge(base.value[key], node, (*path, key), nulls) if key in base.value else node
        for key, node in own.value.items()
    }
    return replace(own, value={**base.value, **merged})


# Overrides ---------------------------------------------------------------------------------------


def apply_overrides(document: YamlDocument, overrides: Sequence[str]) -> YamlDocument:
    """Applies `path.to.key=value` overrides to a document, in order.

    Values are parsed like the file. A number indexes a list. Missing mappings are created. Below
    `phases.N.set` the rest of the path is one key. Then the Python files that the document names as
    plugins are kept; those of overrides are relative to the current folder.

    Raises:
        InvalidSpec: an override cannot be parsed, its path goes through a value without keys, or a
            file cannot be read.
    """
    document = replace(document, root=deepcopy(document.root))
    faults: list[Diagnostic] = []
    for number, text in enumerate(overrides, 1):
        try:
            _apply_override(document.root, number, text)
        except InvalidSpec as error:
            faults += error.diagnostics
    if faults:
        raise build_refusal(faults, document.file)

    def keep(name: str, path: KeyPath) -> str:
        try:
            return keep_plugin_file(name)
        except (SpecError, EnvironmentFault) as error:
            faults.append(locate_diagnostic(build_error(path, str(error), kind="file"), document))
            return name

    _rename_plugins(document, keep)
    if faults:
        raise build_refusal(faults, document.file)
    return document


def _rename_plugins(document: YamlDocument, rename: Callable[[str, KeyPath], str]) -> None:
    """Gives plugins that a document names the names that `rename` makes of theirs."""
    for path, name in list_plugin_names(document.root.tree):
        node = document.find(path)
        assert node is not None
        node.value = rename(name, path)


def _apply_override(root: Node, number: int, text: str) -> None:
    """Sets one value, and the mappings on the way to it that are missing."""
    name, equals, value = text.partition("=")
    parts = name.split(".")

    def locate(start: int, width: int) -> SourceLocation:
        return SourceLocation(_OVERRIDE, number, start + 1, max(1, width), text)

    def refuse(message: str, width: int) -> InvalidSpec:
        fault = Diagnostic(kind="syntax", message=message, position=locate(0, width))
        return build_refusal([fault], _OVERRIDE)

    def move(place: SourceLocation) -> SourceLocation:
        if place.line > 1:
            return replace(place, line=number)
        line = text.splitlines()[0]
        return replace(place, line=number, column=place.column + len(name) + 1, text=line)

    if not equals or not all(parts):
        raise refuse("write an override as path.to.key=value", len(text))
    path: KeyPath = ()
    node, start = root, 0
    while True:
        taken, at = 1, format_key_path(path)
        key: str | int = parts[0]
        if isinstance(node.value, list):
            if not parts[0].isdecimal() or int(parts[0]) >= len(node.value):
                message = f"'{at}' is a list of {len(node.value)}: no item {parts[0]!r}"
                raise refuse(message, len(name))
            key = int(parts[0])
        elif node.value is None or isinstance(node.value, dict):
            node.value = node.value or {}
            if path[:1] == ("phases",) and path[2:] == ("set",):
                taken = len(parts)
            else:  # along the existing values, since keys may contain dots
                lengths = range(len(parts), 0, -1)
                taken = next((n for n in lengths if ".".join(parts[:n]) in node.value), 1)
            key = ".".join(parts[:taken])
        else:
            raise refuse(f"'{at}' has no keys", len(name))
        place = locate(start, len(str(key)))
        path, parts, start = (*path, key), parts[taken:], start + len(str(key)) + 1
        if not parts:
            break
        if isinstance(key, str):
            node.value.setdefault(key, Node({}, place, place))
        node = node.value[key]
    try:
        written = parse_yaml_document(value, _OVERRIDE, move).root
    except InvalidSpec as error:
        faults = [replace(fault, path=()) for fault in error.diagnostics]
        raise build_refusal(faults, _OVERRIDE) from None
    node.value[key] = replace(written, key=None if isinstance(key, int) else place)


# Shipped experiments -----------------------------------------------------------------------------


def find_examples() -> dict[str, Path]:
    """Returns the file of each shipped experiment by its name."""
    return {path.stem: path for path in sorted(locate_examples().glob("*.yaml"))}


def locate_examples() -> Path:
    """Returns the folder of the shipped experiments: in a checkout, `experiments`; a wheel has them
    in the package."""
    package = Path(str(files("rlx")))
    folder = package / "examples"
    return folder if folder.is_dir() else package.parents[1] / "experiments"
