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
)
from rlx.spec.base import KeyPath, get_at_path, has_path, set_at_path
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
    OVERRIDE,
    Place,
    YamlDocument,
    parse_yaml_document,
    read_text,
)
from rlx.spec.training import SuiteSpec
from rlx.text import escape_unprintable

_Model = TypeVar("_Model", bound=BaseModel)
_EXTENDS = "extends"
_IN_PYTHON = "<python>"
_SELECTORS = ("plugin", "kind", "strategy", "engine")
"""Keys that select what the other keys of their section mean; in `estimator`, `name` does."""


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """An experiment as it was read: what was written in its file, or in Python, and by overrides,
    and the spec."""

    document: YamlDocument
    spec: ExperimentSpec

    @property
    def origins(self) -> dict[str, str]:
        """Maps the dotted path of every value to `default`, `FILE:line` or `--set`; a list of plain
        values counts as one value."""
        origins = {}
        for at, _ in _list_leaves(self.spec.dump_resolved(), ()):
            written = at
            if at[-1] == "kind" and isinstance(get_at_path(self.document.tree, at[:-1]), str):
                written = at[:-1]  # a bare kind, such as `launcher: slurm`
            origin = "default"
            if found := self.document.places.get(written):
                place = found.value
                origin = "--set" if place.file == OVERRIDE else f"{place.file}:{place.line}"
            origins[format_key_path(at)] = origin
        return origins


def list_leaf_values(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields every value of an experiment with its dotted path; a list of plain values is one."""
    for path, value in _list_leaves(tree, ()):
        yield format_key_path(path), value


def _list_leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    is_list = isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    if is_list or (isinstance(value, dict) and value):
        for key, below in enumerate(value) if is_list else value.items():
            yield from _list_leaves(below, (*path, key))
    else:
        yield path, value


def read_document(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> YamlDocument:
    """Reads an experiment and those that it extends, and applies the overrides, without validation.

    Paths in content that is given in Python are relative to the current folder.

    Raises:
        InvalidSpec: a file is not YAML that rlx accepts, or an override cannot be applied.
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
    keys = document.tree
    if "sets" in keys and not {"task", "rollout", "rewards"} & keys.keys():
        message = "this is a suite of held-out sets, not an experiment"
        help_ = f"evaluate a run with it: rlx eval RUN --suite {document.file}"
        raise _build_refusal(document, ("sets",), message, help_, kind="syntax")
    return apply_overrides(document, overrides)


def read_own_values(path: Path) -> YamlDocument | None:
    """Parses what a file changes of the file that it extends; None if it extends none."""
    document = _read_mapping(path)
    return document if document.tree.pop(_EXTENDS, None) else None


def read_suite(path: Path) -> SuiteSpec:
    """Reads and validates one suite, without the values that its sets change."""
    document = _read_mapping(path)
    return validate_document_values(SuiteSpec, document.tree, document)


def validate_document_values(model: type[_Model], values: Any, document: YamlDocument) -> _Model:
    """Returns values of a document as a model, or raises `InvalidSpec` with every error."""
    found, faults = validate_values(model, values)
    if found is None:
        raise document.build_refusal(faults)
    return found


def _read_mapping(path: Path, name: str | None = None) -> YamlDocument:
    """Parses a file with a mapping at its top, without the file that it extends."""
    document = parse_yaml_document(read_text(path), name or str(path))
    if not isinstance(document.tree, dict):
        what = f"{document.file} is {'empty' if document.tree is None else 'not a mapping'}"
        help_ = "an experiment starts with `name: ...`"
        raise build_refusal([build_error((), what, help_, kind="syntax")], document.file)
    return document


def _write_document(content: Mapping[str, Any]) -> YamlDocument:
    """Writes the content of an experiment that was given in Python, as JSON, which is YAML.

    Values are what YAML has, paths, and Pydantic objects. A plugin may be a function or a class,
    whose source is kept.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value.model_dump(mode="json")
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, PurePath):
            return str(value)
        if getattr(value, "ndim", None) == 0:  # of NumPy or PyTorch
            return value.item()
        if callable(value):
            return keep_plugin_source(value)
        raise TypeError(f"it has a value of type {type(value).__name__}")

    try:
        text = json.dumps(content, default=convert, indent=2, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"the experiment cannot be written as YAML: {error}") from error
    return parse_yaml_document(text, _IN_PYTHON)


def _build_refusal(
    document: YamlDocument, path: KeyPath, message: str, *helps: str, kind: Any = "file"
) -> InvalidSpec:
    return document.build_refusal([build_error(path, message, *helps, kind=kind)])


# Files that extend others ------------------------------------------------------------------------


def _extend(document: YamlDocument, folder: Path, chain: Sequence[Path]) -> YamlDocument:
    """Merges a document onto its base.

    Args:
        folder: what the document's paths are relative to.
        chain: the files that extend it, the first one first, and its own.
    """
    _rename_plugins(document, lambda name, _: anchor_file(name, folder))
    if _EXTENDS not in document.tree:
        return document
    path, name = _find_base(document, folder, chain)
    if any(path.samefile(one) for one in chain):
        circle = " → ".join(escape_unprintable(str(one)) for one in (*chain, path))
        message = f"files extend each other in a circle: {circle}"
        raise _build_refusal(document, (_EXTENDS,), message)
    try:
        base = _extend(_read_mapping(path, name), path.parent, [*chain, path])
    except InvalidSpec as error:  # the file that the user named is the one that cannot be run
        raise build_refusal(error.diagnostics, document.file) from None
    except SpecError as error:
        raise _build_refusal(document, (_EXTENDS,), str(error)) from error
    del document.tree[_EXTENDS]
    tree = _merge(base.tree, document.tree, ())
    for at in {fault.path for fault in validate_values(ExperimentSpec, tree)[1]}:
        is_merged = all(isinstance(step, str) for step in at)  # unlike what is in a list
        if is_merged and has_path(base.tree, at) and get_at_path(tree, at) is None:
            del get_at_path(tree, at[:-1])[at[-1]]  # null leaves out what cannot be null
    places = {**base.places, **document.places}
    places = {path: place for path, place in places.items() if has_path(tree, path)}
    text = f"{document.text.rstrip()}\n--- # {escape_unprintable(base.file)}\n{base.text}"
    return replace(document, text=text, tree=tree, places=places)


def _find_base(document: YamlDocument, folder: Path, chain: Sequence[Path]) -> tuple[Path, str]:
    """Returns the file that a document extends, and its name in messages."""
    named = document.tree[_EXTENDS]
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


def _merge(base: Any, own: Any, path: KeyPath) -> Any:
    """Returns the values of `own` over those of `base`."""
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return own
    for key in (*_SELECTORS, "name") if path == ("estimator",) else _SELECTORS:
        if key in own and isinstance(base.get(key), str) and base[key] != own[key]:
            return own
    merged = {key: _merge(base.get(key), value, (*path, key)) for key, value in own.items()}
    return {**base, **merged}


# Overrides ---------------------------------------------------------------------------------------


def apply_overrides(document: YamlDocument, overrides: Sequence[str]) -> YamlDocument:
    """Applies `path.to.key=value` overrides to a document, in order.

    Values are parsed like the file. Then the Python files that the document names as plugins are
    kept; those of overrides are relative to the current folder.

    Raises:
        InvalidSpec: an override cannot be parsed, its path goes through a value without keys, or a
            file cannot be read.
    """
    tree, places = deepcopy(document.tree), dict(document.places)
    faults: list[Diagnostic] = []
    for number, text in enumerate(overrides, 1):
        try:
            _apply_override(tree, places, number, text)
        except InvalidSpec as error:
            faults += error.diagnostics
    if faults:
        raise build_refusal(faults, document.file)
    document = replace(document, tree=tree, places=places)

    def keep(name: str, path: KeyPath) -> str:
        try:
            return keep_plugin_file(name)
        except (SpecError, EnvironmentFault) as error:
            faults.append(build_error(path, str(error), kind="file"))
            return name

    _rename_plugins(document, keep)
    if faults:
        raise document.build_refusal(faults)
    return document


def _rename_plugins(document: YamlDocument, rename: Callable[[str, KeyPath], str]) -> None:
    """Gives plugins that a document names the names that `rename` makes of theirs."""
    for path, name in list(list_plugin_names(document.tree)):
        get_at_path(document.tree, path[:-1])[path[-1]] = rename(name, path)


def _apply_override(tree: Any, places: dict[KeyPath, Place], number: int, text: str) -> None:
    """Sets one value, and the mappings on the way to it that are missing."""
    name, equals, value = text.partition("=")
    written = parse_yaml_document(value, OVERRIDE, before=name + equals, number=number)
    try:
        if not equals or not all(name.split(".")):
            raise ValueError("write an override as path.to.key=value")
        path = set_at_path(tree, name, written.tree)
    except ValueError as error:
        position = SourceLocation(OVERRIDE, number, 1, max(1, len(name)), text)
        fault = build_error((), str(error), kind="syntax", position=position)
        raise build_refusal([fault], OVERRIDE) from error
    for former in [one for one in places if one[: len(path)] == path]:
        del places[former]
    start = 1
    for end, key in enumerate(path, 1):
        at = SourceLocation(OVERRIDE, number, start, len(str(key)), text)
        places.setdefault(path[:end], Place(at, at))
        start += len(str(key)) + 1
    places |= {(*path, *below): found for below, found in written.places.items()}
    places[path] = Place(places[path].value, None if isinstance(path[-1], int) else at)


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
