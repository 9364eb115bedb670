"""Resolves `extends`: an experiment that names another file and changes some of its values.

Mappings are merged key by key. Lists and all other values are replaced, and so is a section that
names another plugin, since the former one's options would not fit it. Each value keeps its place
in the file that it comes from, so that errors and `rlx validate --values` can name it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlx.errors import SpecError
from rlx.spec.base import KeyPath
from rlx.spec.experiment import ExperimentSpec
from rlx.spec.reading.diagnostics import Diagnostic, InvalidSpec, build_refusal, suggest_name
from rlx.spec.reading.examples import find_examples
from rlx.spec.reading.schema_paths import is_left_out_by_null
from rlx.spec.reading.yaml_source import YamlDocument, parse_yaml_document, read_text
from rlx.text import escape_unprintable

__all__ = ["EXTENDS", "read_extended_document", "read_mapping", "read_own_values"]

EXTENDS = "extends"
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


def read_extended_document(path: Path) -> YamlDocument:
    """Parses a file, and merges it onto the file that it extends.

    Raises:
        InvalidSpec: a file is not YAML that rlx accepts, there is no file to extend, or files
            extend each other in a circle.
        SpecError: the file cannot be opened.
    """
    return _extend(read_mapping(path), [path])


def read_own_values(path: Path) -> YamlDocument | None:
    """Parses what a file changes of the file that it extends; None if it extends none.

    Raises:
        InvalidSpec, SpecError: as `read_mapping`.
    """
    document = read_mapping(path)
    if EXTENDS not in document.tree:
        return None
    return replace(document, tree={k: v for k, v in document.tree.items() if k != EXTENDS})


def _extend(document: YamlDocument, chain: Sequence[Path]) -> YamlDocument:
    """Merges a document onto its base.

    Args:
        chain: the files from the first to the document's own, each extended by the one before it.
    """
    if EXTENDS not in document.tree:
        return document
    path, name = _find_base(document, chain[-1])
    if any(path.samefile(one) for one in chain):
        circle = " → ".join(escape_unprintable(str(one)) for one in (*chain, path))
        raise _refuse_base(document, f"files extend each other in a circle: {circle}")
    try:
        base = _extend(read_mapping(path, name), [*chain, path])
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


def _find_base(document: YamlDocument, path: Path) -> tuple[Path, str]:
    """Returns the file that a document extends, and its name in messages.

    Raises:
        InvalidSpec: `extends` is no text, or there is no such file and no such example.
    """
    named = document.tree[EXTENDS]
    if not isinstance(named, str) or not named or "\0" in named:
        raise _refuse_base(document, "'extends' must be the path of one file", kind="value")
    there = path.parent / named
    if os.path.isfile(there):  # noqa: PTH113  (false also for names that are no file's)
        return there, os.path.normpath(there)
    examples = find_examples()
    if named in examples:
        return examples[named], f"example {named}"
    siblings = [one.name for one in path.parent.glob("*.y*ml") if one != path]
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
    gone = [*merge.replaced]
    for path in merge.nulls:
        if is_left_out_by_null(ExperimentSpec, path, tree):
            _remove_at(tree, path)
            gone.append(path)
    left_out = gone[len(merge.replaced) :]
    keys, values = (
        {
            **{at: p for at, p in of_base.items() if not _is_below(at, gone)},
            **{at: p for at, p in of_own.items() if not _is_below(at, [(EXTENDS,), *left_out])},
        }
        for of_base, of_own in ((base.keys, own.keys), (base.values, own.values))
    )
    bases = ((base.file, base.text), *base.bases)
    return replace(own, tree=tree, keys=keys, values=values, bases=bases)


def _remove_at(tree: Any, path: KeyPath) -> None:
    for step in path[:-1]:
        tree = tree[step]
    del tree[path[-1]]


def _is_below(path: KeyPath, tops: Sequence[KeyPath]) -> bool:
    return any(path[: len(top)] == top for top in tops)
