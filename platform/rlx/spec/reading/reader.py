"""Reads experiments and suites, with the files that they extend and the overrides of a command.

A file may extend another, and change some of its values. Mappings are merged key by key. Lists and
all other values are replaced, and so is a section that names another plugin, since the former one's
options would not fit it. Each value keeps its place in the file that it comes from, so that errors
and `rlx validate --values` can name it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any, Self

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from rlx.errors import EnvironmentFault, SpecError
from rlx.plugin_files import (
    anchor_file,
    keep_plugin_file,
    keep_plugin_source,
    map_plugin_names,
    names_plugin,
)
from rlx.spec.base import KeyPath, get_at_path
from rlx.spec.experiment import ExperimentSpec
from rlx.spec.reading.diagnostics import (
    Diagnostic,
    InvalidSpec,
    SourceLocation,
    build_refusal,
    format_key_path,
    suggest_name,
)
from rlx.spec.reading.validation_errors import explain_validation_error
from rlx.spec.reading.yaml_source import (
    YamlDocument,
    locate_diagnostic,
    parse_yaml_document,
    read_text,
)
from rlx.spec.training import SuiteSpec
from rlx.text import escape_unprintable

EXTENDS = "extends"
IN_PYTHON = "<python>"
"""Name of an experiment that was given as a mapping."""
_SELECTORS = ("plugin", "kind", "strategy", "engine")
"""Keys that select what the other keys of their section mean; in `estimator`, `name` does."""


def read_mapping(path: Path, name: str | None = None) -> YamlDocument:
    """Parses a file with a mapping at its top, without the file that it extends.

    Args:
        name: of the file in messages; by default its path.

    Raises:
        InvalidSpec: the file is not YAML that rlx accepts.
        SpecError: the file cannot be opened.
    """
    document = parse_yaml_document(read_text(path), name or str(path))
    if not isinstance(document.tree, dict):
        empty = document.tree is None
        message = "the file is empty" if empty else "the file is not a mapping at its top"
        help_ = "an experiment starts with `name: ...`"
        fault = Diagnostic(kind="syntax", message=message, helps=(help_,))
        raise build_refusal([fault], document.file)
    return document


def write_document(content: Mapping[str, Any]) -> YamlDocument:
    """Writes the content of an experiment that was given in Python, as JSON, which is YAML.

    Values are what YAML has, paths, and Pydantic objects. A plugin may be a function or a class,
    whose source is kept.

    Raises:
        InvalidSpec: a value cannot be written, or the source of a plugin cannot be kept.
    """
    faults: list[Diagnostic] = []
    try:
        tree = _write_value(content, (), faults)
    except RecursionError:
        message = "the mapping contains itself, or is nested too deeply"
        raise build_refusal([Diagnostic(kind="value", message=message)], IN_PYTHON) from None
    if faults:
        raise build_refusal(faults, IN_PYTHON)
    return parse_yaml_document(json.dumps(tree, indent=2, ensure_ascii=False), IN_PYTHON)


def _write_value(value: Any, path: KeyPath, faults: list[Diagnostic]) -> Any:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {
            str(key): _write_value(each, (*path, str(key)), faults) for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_write_value(each, (*path, n), faults) for n, each in enumerate(value)]
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
    message = f"'{format_key_path(path)}': {message}"
    faults.append(Diagnostic(kind="value", message=message, path=path))
    return None


def read_own_values(path: Path) -> YamlDocument | None:
    """Parses what a file changes of the file that it extends; None if it extends none.

    Raises:
        InvalidSpec, SpecError: as `read_mapping`.
    """
    document = read_mapping(path)
    if EXTENDS not in document.tree:
        return None
    return replace(document, tree={k: v for k, v in document.tree.items() if k != EXTENDS})


def _extend(document: YamlDocument, folder: Path, chain: Sequence[Path]) -> YamlDocument:
    """Merges a document onto its base.

    Args:
        folder: what the document's paths are relative to.
        chain: the files from the first to the document's own, each extended by the one before it;
            a document that was given in Python has none.
    """
    document = replace(
        document, tree=map_plugin_names(document.tree, lambda name, _: anchor_file(name, folder))
    )
    if EXTENDS not in document.tree:
        return document
    path, name = _find_base(document, folder, chain)
    if any(path.samefile(one) for one in chain):
        circle = " → ".join(escape_unprintable(str(one)) for one in (*chain, path))
        raise _refuse_base(document, f"files extend each other in a circle: {circle}")
    try:
        base = _extend(read_mapping(path, name), path.parent, [*chain, path])
    except InvalidSpec as error:
        # The file that the user named is the one that cannot be run.
        faults = [_locate_in_base(fault, name) for fault in error.diagnostics]
        raise build_refusal(faults, document.file) from None
    except SpecError as error:
        raise _refuse_base(document, str(error)) from error
    return _merge_documents(base, document)


def _locate_in_base(fault: Diagnostic, name: str) -> Diagnostic:
    """Returns a fault of a base, which names the base if it has no position."""
    if fault.position is not None:
        return fault
    return replace(fault, message=f"{fault.message} ({escape_unprintable(name)})")


def _find_base(document: YamlDocument, folder: Path, chain: Sequence[Path]) -> tuple[Path, str]:
    """Returns the file that a document extends, and its name in messages.

    Raises:
        InvalidSpec: `extends` is no text, or there is no such file and no such example.
    """
    named = document.tree[EXTENDS]
    if not isinstance(named, str) or not named or "\0" in named:
        raise _refuse_base(document, "'extends' must be the path of one file", kind="value")
    there = folder / named
    if os.path.isfile(there):  # noqa: PTH113  (false also for names that are no file's)
        return there, os.path.normpath(there)
    examples = find_examples()
    if named in examples:
        return examples[named], f"example {named}"
    siblings = [one.name for one in folder.glob("*.y*ml") if one not in chain[-1:]]
    raise _refuse_base(
        document,
        f"'extends': there is no file and no example {escape_unprintable(named)!r}",
        suggest_name(named, [*siblings, *examples], "a path is relative to this file's folder"),
    )


def _refuse_base(
    document: YamlDocument, message: str, *helps: str, kind: Any = "file"
) -> InvalidSpec:
    fault = Diagnostic(
        kind=kind,
        message=message,
        path=(EXTENDS,),
        position=document.locate((EXTENDS,)),
        helps=helps,
    )
    return build_refusal([fault], document.file)


# Merging ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Merge:
    """What merging two trees has found.

    Attributes:
        replaced: paths whose base value is gone, with all below it.
        nulls: paths where null stands against a value of the base.
    """

    replaced: list[KeyPath] = field(default_factory=list)
    nulls: list[KeyPath] = field(default_factory=list)

    def merge(self, base: Any, own: Any, path: KeyPath = ()) -> Any:
        """Returns the value of `own` over that of `base`."""
        is_section = isinstance(base, dict) and isinstance(own, dict)
        if not is_section or _selects_other(base, own, path):
            self.replaced.append(path)
            if own is None and base is not None:
                self.nulls.append(path)
            return own
        changed = {
            key: self.merge(base[key], value, (*path, key)) if key in base else value
            for key, value in own.items()
        }
        return {**base, **changed}


def _selects_other(base: Mapping[str, Any], own: Mapping[str, Any], path: KeyPath) -> bool:
    """Whether both sections select what they are, and differ in it."""
    selectors = (*_SELECTORS, "name") if path == ("estimator",) else _SELECTORS
    pairs = [(base[key], own[key]) for key in selectors if key in base and key in own]
    return any(isinstance(one, str) and one != other for one, other in pairs)


def _merge_documents(base: YamlDocument, own: YamlDocument) -> YamlDocument:
    merge = _Merge()
    tree = merge.merge(base.tree, {key: v for key, v in own.tree.items() if key != EXTENDS})
    left_out = _find_refused_values(tree).intersection(merge.nulls) if merge.nulls else set()
    for path in left_out:
        del get_at_path(tree, path[:-1])[path[-1]]
    gone = [*merge.replaced, *left_out]
    keys, values = (
        {
            **{at: p for at, p in of_base.items() if not _is_below(at, gone)},
            **{at: p for at, p in of_own.items() if not _is_below(at, [(EXTENDS,), *left_out])},
        }
        for of_base, of_own in ((base.keys, own.keys), (base.values, own.values))
    )
    bases = ((base.file, base.text), *base.bases)
    return replace(own, tree=tree, keys=keys, values=values, bases=bases)


def _find_refused_values(tree: Any) -> set[KeyPath]:
    """Returns the paths of values that an experiment cannot have."""
    try:
        ExperimentSpec.model_validate_json(to_json(tree), strict=True)
    except ValidationError as error:
        return {fault.path for fault in explain_validation_error(error, ExperimentSpec, tree)}
    return set()


def _is_below(path: KeyPath, tops: Sequence[KeyPath]) -> bool:
    return any(path[: len(top)] == top for top in tops)


_OVERRIDE = "<override>"


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """An experiment with the origin of each value.

    Attributes:
        path: the file, or `<python>`.
        yaml: text of the file and of those that it extends, without the overrides.
        spec: the spec, with the overrides.
        origins: maps the dotted path of every value to `default`, `FILE:line` or `--set`;
            a list of plain values counts as one value.
        document: values and source locations as written.
    """

    path: Path
    yaml: str
    spec: ExperimentSpec
    origins: Mapping[str, str]
    document: YamlDocument

    @classmethod
    def from_document(cls, path: Path, document: YamlDocument, spec: ExperimentSpec) -> Self:
        """Returns the experiment `spec` that was validated from `document`."""
        origins = {
            format_key_path(at): _describe_origin(at, document)
            for at in _list_leaf_paths(spec.dump_resolved(), ())
        }
        return cls(path, document.whole_text, spec, origins, document)


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
    if isinstance(source, Path):
        _require_experiment_file(source)
        document = _extend(read_mapping(source), source.parent, [source])
    else:
        document = _extend(write_document(source), Path(), [])
    keys = document.tree.keys() if isinstance(document.tree, dict) else set()
    if "sets" in keys and not {"task", "rollout", "rewards"} & keys:
        raise build_refusal([_build_suite_fault(document)], document.file)
    return apply_overrides(document, overrides)


def _require_experiment_file(path: Path) -> None:
    """Names the example that somebody may have meant by a file that is not there.

    Raises:
        SpecError: there is no such file, but such an example.
    """
    if not path.exists() and path.stem in find_examples():
        raise SpecError(
            f"cannot read {escape_unprintable(str(path))}: there is no such file, but an example: "
            f"rlx new --from {path.stem}"
        )


def _keep_plugin_files(document: YamlDocument) -> YamlDocument:
    """Keeps the Python files that a document names as plugins, and names them as they are kept.

    Raises:
        InvalidSpec: a file cannot be read or kept.
    """
    faults: list[Diagnostic] = []

    def keep(name: str, path: KeyPath) -> str:
        try:
            return keep_plugin_file(name)
        except (SpecError, EnvironmentFault) as error:
            position = document.locate(path)
            faults.append(Diagnostic(kind="file", message=str(error), path=path, position=position))
            return name

    tree = map_plugin_names(document.tree, keep)
    if faults:
        raise build_refusal(faults, document.file)
    return replace(document, tree=tree)


def _build_suite_fault(document: YamlDocument) -> Diagnostic:
    return Diagnostic(
        kind="syntax",
        message="this is a suite of held-out sets, not an experiment",
        position=document.keys["sets",],
        helps=(f"evaluate a run with it: rlx eval RUN --suite {document.file}",),
    )


def apply_overrides(document: YamlDocument, overrides: Sequence[str]) -> YamlDocument:
    """Applies `path.to.key=value` overrides to a document, in order.

    Values are parsed like the file. A number indexes a list. Missing mappings are created. Below
    `phases.N.set` the rest of the path is one key. Then the Python files that the document names as
    plugins are kept; those of overrides are relative to the current folder.

    Raises:
        InvalidSpec: an override cannot be parsed, its path goes through a value without keys, or a
            file cannot be read.
    """
    faults: list[Diagnostic] = []
    for number, text in enumerate(overrides, 1):
        try:
            document = _apply_override(document, number, text)
        except InvalidSpec as error:
            faults += error.diagnostics
    if faults:
        raise build_refusal(faults, document.file)
    return _keep_plugin_files(document)


def _apply_override(document: YamlDocument, number: int, text: str) -> YamlDocument:
    name, equals, value = text.partition("=")
    if not equals or not all(name.split(".")):
        message = "write an override as path.to.key=value"
        raise _build_override_refusal(message, number, text, 0, len(text))
    path = tuple(_split_override_path(document.tree, name, number, text))
    tree = deepcopy(document.tree)
    keys, values = (
        {at: place for at, place in places.items() if at[: len(path)] != path}
        for places in (document.keys, document.values)
    )
    node = tree
    start = 0
    for depth, step in enumerate(path):
        width = len(str(step))
        at = path[: depth + 1]
        mine = _build_override_position(number, text, start, width)
        if not isinstance(step, int):
            keys[at] = keys.get(at, mine)
        values[at] = values.get(at, mine)
        start += width + 1
        if depth < len(path) - 1:
            if isinstance(node, dict) and node.get(step) is None:
                node[step] = {}
            node = node[step]
    written = _parse_override_value(value, number, text, start)
    node[path[-1]] = written.tree
    keys |= {(*path, *at): place for at, place in written.keys.items()}
    values |= {(*path, *at): place for at, place in written.values.items()}
    return replace(document, tree=tree, keys=keys, values=values)


def _split_override_path(tree: Any, name: str, number: int, text: str) -> Iterator[str | int]:
    """Splits a dotted path along the existing values, since keys may contain dots."""
    parts = name.split(".")
    done: KeyPath = ()
    node = tree
    while parts:
        step: str | int = parts[0]
        taken = 1
        if done[:1] == ("phases",) and done[2:] == ("set",):
            taken = len(parts)
            step = ".".join(parts)
        elif isinstance(node, list):
            if not parts[0].isdecimal() or int(parts[0]) >= len(node):
                message = (
                    f"'{format_key_path(done)}' is a list of {len(node)}: no item {parts[0]!r}"
                )
                raise _build_override_refusal(message, number, text, 0, len(name))
            step = int(parts[0])
        elif isinstance(node, dict):
            lengths = range(len(parts), 0, -1)
            taken = next((n for n in lengths if ".".join(parts[:n]) in node), 1)
            step = ".".join(parts[:taken])
        elif node is not None:
            message = f"'{format_key_path(done)}' has no keys"
            raise _build_override_refusal(message, number, text, 0, len(name))
        yield step
        done = (*done, step)
        node = node[step] if isinstance(step, int) else (node or {}).get(step)
        parts = parts[taken:]


def _parse_override_value(value: str, number: int, text: str, start: int) -> YamlDocument:
    """Parses an override's value; its source locations are relative to the whole override."""

    def move_position(place: SourceLocation) -> SourceLocation:
        column = place.column + start if place.line == 1 else place.column
        line = text.splitlines()[0] if place.line == 1 else place.text
        return replace(place, line=number, column=column, text=line)

    try:
        read = parse_yaml_document(value, _OVERRIDE)
    except InvalidSpec as error:
        faults = [
            replace(d, path=(), position=d.position and move_position(d.position))
            for d in error.diagnostics
        ]
        raise build_refusal(faults, _OVERRIDE) from None
    return replace(
        read,
        keys={at: move_position(place) for at, place in read.keys.items()},
        values={at: move_position(place) for at, place in read.values.items()}
        or {(): _build_override_position(number, text, 0, len(text))},
    )


def _build_override_position(number: int, text: str, start: int, width: int) -> SourceLocation:
    return SourceLocation(_OVERRIDE, number, start + 1, max(1, width), text)


def _build_override_refusal(
    message: str, number: int, text: str, start: int, width: int
) -> InvalidSpec:
    position = _build_override_position(number, text, start, width)
    return build_refusal([Diagnostic(kind="syntax", message=message, position=position)], _OVERRIDE)


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


def _describe_origin(path: KeyPath, document: YamlDocument) -> str:
    place = document.values.get(path)
    if (
        place is None
        and path[-1] == "kind"
        and isinstance(get_at_path(document.tree, path[:-1]), str)
    ):
        place = document.values.get(path[:-1])  # a bare kind, such as `launcher: slurm`
    if place is None:
        return "default"
    return "--set" if place.file == _OVERRIDE else f"{place.file}:{place.line}"


def read_suite(path: Path) -> SuiteSpec:
    """Reads and validates one suite, without the values that its sets change.

    Raises:
        InvalidSpec: lists every error in the file.
        SpecError: the file cannot be opened.
    """
    document = read_mapping(path)
    try:
        return SuiteSpec.model_validate_json(to_json(document.tree), strict=True)
    except ValidationError as error:
        faults = explain_validation_error(error, SuiteSpec, document.tree)
        raise build_refusal(
            [locate_diagnostic(f, document) for f in faults], document.file
        ) from None


_SOURCES = "experiments"
"""Folder of the examples in a checkout; a wheel has them in the package."""


def find_examples() -> dict[str, Path]:
    """Returns the file of each shipped experiment by its name."""
    return {path.stem: path for path in sorted(locate_examples().glob("*.yaml"))}


def locate_examples() -> Path:
    """Returns the folder of the shipped experiments: in a checkout, `experiments`."""
    package = Path(str(files("rlx")))
    folder = package / "examples"
    return folder if folder.is_dir() else package.parents[1] / _SOURCES
