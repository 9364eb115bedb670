"""`rlx plugins check`: checks the promises of plugins, installed or not; prints a line each."""

import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal
from unittest import SkipTest

from rlx.cli.output import print_json, print_text
from rlx.cli.plugins import find_named_plugins
from rlx.cli.verb_group import build_error_json, format_error_text
from rlx.discovery import (
    GROUPS,
    InstalledPlugin,
    PluginFault,
    build_plugin,
    build_plugin_diagnostic,
    list_installed_plugins,
    load_plugin,
)
from rlx.errors import PluginError, RlxError, SpecError
from rlx.plugin import Plugin
from rlx.plugin_files import keep_plugin_file
from rlx.spec import PluginUse
from rlx.spec.reading import parse_yaml_document
from rlx.testing import (
    FindsToJudge,
    PromiseCheck,
    first_import,
    list_plugin_checks,
    required_options,
)
from rlx.text import escape_unprintable

_MARKS = {"kept": "✓", "broken": "✗", "open": "?", "skipped": "-"}


@dataclass(frozen=True, slots=True)
class PromiseVerdict:
    """The result of checking one promise.

    Attributes:
        promise: name of the promise.
        state: "skipped" if the promise does not apply, "open" if the author has to judge.
        why: why it is not kept; "" if it is.
        help: how to fix it; "" unless it is broken.
        notes: lines about what the check found.
    """

    promise: str
    state: Literal["kept", "broken", "open", "skipped"]
    why: str = ""
    help: str = ""
    notes: tuple[str, ...] = ()


def run_conformance_checks(
    what: str,
    kind: str | None,
    options: Sequence[str],
    *,
    as_json: bool,
) -> int:
    """Checks a plugin, or every plugin of a distribution, and prints the results.

    Args:
        what: name of an installed plugin, or path of a distribution.
        kind: check only plugins of this kind.
        options: "key=value" each; only if a single plugin is checked.
        as_json: print JSON instead of lines.

    Returns:
        The exit code: 0 when every promise holds, 3 when one is broken.

    Raises:
        RlxError: nothing could be checked.
    """
    entries = []
    with ExitStack() as stack:
        plugins = _select_requested_plugins(what, kind, stack)
        values = _parse_plugin_options(options)
        if values and len(plugins) > 1:
            kinds = ", ".join(f.kind for f in plugins)
            raise SpecError(f"--option is for one plugin, and these are {kinds}: add --kind")
        for number, found in enumerate(plugins):
            if not as_json:
                title = f"{found.name}  ({found.kind}, {found.source})"
                print_text(("\n" if number else "") + escape_unprintable(title))
            entries.append(_check_plugin_promises(found, values, aloud=not as_json))
    if as_json:
        print_json(entries)
    codes = [entry["exit_code"] for entry in entries if entry["exit_code"]]
    return min(codes, default=0)


def _select_requested_plugins(
    what: str, kind: str | None, stack: ExitStack
) -> list[InstalledPlugin]:
    if kind is not None and kind not in GROUPS:
        raise SpecError(f"no plugin kind {kind!r}; there are: {', '.join(GROUPS)}")
    path = Path(what)
    known = any(f.name == what.rpartition(":")[2] for f in list_installed_plugins())
    in_file = keep_plugin_file(what) != what
    if (path.exists() and not known) or path.suffix == ".whl" or ("/" in what and not in_file):
        distribution = stack.enter_context(add_to_sys_path(path))
        plugins = [f for f in list_installed_plugins() if f.distribution == distribution]
    else:
        plugins = find_named_plugins(what)
    plugins = [f for f in plugins if kind in (None, f.kind)]
    if not plugins:
        raise PluginError(f"{escape_unprintable(what)} provides no {kind} plugin")
    return plugins


def _parse_plugin_options(texts: Sequence[str]) -> dict[str, Any]:
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SpecError(f"write an option as KEY=VALUE, not {escape_unprintable(text)!r}")
        values[key] = parse_yaml_document(value, f"--option {key}").tree
    return values


def _check_plugin_promises(
    found: InstalledPlugin, options: Mapping[str, Any], *, aloud: bool
) -> dict[str, Any]:
    """Checks one plugin; prints each verdict as it comes if `aloud`."""
    entry = {"name": found.name, "kind": found.kind, "from": found.source}
    try:
        subject = _load_checked_plugin(found, options)
    except RlxError as error:
        if aloud:
            print_text("\n".join(f"  {line}" for line in format_error_text(error).splitlines()))
        return entry | {"exit_code": error.exit_code, "promises": []} | build_error_json(error)
    verdicts = []
    for verdict in (
        _check_one_promise(promise, subject) for promise in list_plugin_checks(found.kind)
    ):
        verdicts.append(verdict)
        if aloud:
            print_text(_format_verdict(verdict))
    broken = sum(v.state == "broken" for v in verdicts)
    if aloud:
        kept = sum(v.state == "kept" for v in verdicts)
        unsure = sum(v.state == "open" for v in verdicts)
        text = f"{kept} kept, {broken} broken" if broken else f"all {kept} promises hold"
        print_text(f"  {text}" + (f", {unsure} for you to judge" if unsure else ""))
    return entry | {"exit_code": 3 if broken else 0, "promises": [asdict(v) for v in verdicts]}


def _format_verdict(verdict: PromiseVerdict) -> str:
    why = f": {escape_unprintable(verdict.why)}" if verdict.why else ""
    help_ = f"\n      = help: {verdict.help}" if verdict.help else ""
    notes = "".join(f"\n      {escape_unprintable(note)}" for note in verdict.notes)
    return f"  {_MARKS[verdict.state]} {verdict.promise}{why}{help_}{notes}"


def _load_checked_plugin(
    found: InstalledPlugin, options: Mapping[str, Any]
) -> Plugin | type[Plugin]:
    """Returns the plugin class, or the plugin built with the options if there are any.

    Raises:
        PluginFault: the plugin cannot be imported, which is tried in another process first.
        SpecError: the options do not fit, or required ones are missing.
    """
    module, _, attribute = found.value.partition(":")
    died = first_import(module, attribute.partition(".")[0]).died
    if died is not None:
        raise PluginFault(build_plugin_diagnostic(found, f"cannot be imported: {died}"))
    name = found.full_name
    cls = load_plugin(found.kind, name)
    if options:
        return build_plugin(PluginUse.model_validate({**options, "plugin": name}), found.kind)
    missing = [] if getattr(cls, "examples", ()) else required_options(cls)
    if missing:
        raise SpecError(
            f"{found.kind} plugin '{escape_unprintable(found.name)}' cannot be built without "
            f"{', '.join(missing)}: use `--option {missing[0]}=VALUE`, with the value as in YAML"
        )
    return cls


def _check_one_promise(promise: PromiseCheck, subject: Plugin | type[Plugin]) -> PromiseVerdict:
    try:
        notes = promise(subject)
    except SkipTest as reason:
        return PromiseVerdict(promise.name, "skipped", str(reason))
    except AssertionError as error:
        return PromiseVerdict(promise.name, "broken", str(error), promise.help)
    except Exception as error:  # noqa: BLE001  a plugin may raise anything
        return PromiseVerdict(
            promise.name, "broken", f"{type(error).__name__}: {error}", promise.help
        )
    if isinstance(notes, FindsToJudge):
        return PromiseVerdict(promise.name, "open", "judge what was found", notes=tuple(notes))
    return PromiseVerdict(promise.name, "kept", notes=tuple(notes))


_ROOTS = ("src", ".")
"""Folders of a distribution that may hold its modules."""


@contextmanager
def add_to_sys_path(path: Path) -> Iterator[str]:
    """Puts a distribution at the front of `sys.path` and yields its name.

    Args:
        path: a wheel, or a folder with a `pyproject.toml`.

    Raises:
        SpecError: the path is neither.
        PluginError: it offers no plugin, or its modules are not where rlx looks for them.
    """
    before = list(sys.path)
    with tempfile.TemporaryDirectory(prefix="rlx-check-") as folder:
        there = Path(folder)
        try:
            if path.is_dir():
                sys.path[:0] = [folder, *_write_distribution_metadata(path, there)]
            else:
                _unzip_wheel(path, there)
                sys.path.insert(0, folder)
            (found,) = distributions(path=[folder])
            offered = [p for p in found.entry_points if p.group in GROUPS.values()]
            if not offered:
                groups = ", ".join(GROUPS.values())
                raise PluginError(
                    f"{_format_printable_path(path)} provides no plugin: no entry point under "
                    f"{groups}"
                )
            _require_named_packages({p.value for p in offered}, path)
            yield found.name
        finally:
            sys.path[:] = before


def _unzip_wheel(wheel: Path, there: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(there)
    except (OSError, zipfile.BadZipFile) as error:
        raise SpecError(
            f"cannot read {_format_printable_path(wheel)} as a wheel: {error}"
        ) from error
    if len(list(there.glob("*.dist-info"))) != 1:
        raise SpecError(
            f"{_format_printable_path(wheel)} is not a wheel: it has no .dist-info folder"
        )


def _write_distribution_metadata(folder: Path, there: Path) -> list[str]:
    """Writes the metadata of a distribution's folder; returns the folders with its modules."""
    project = _read_project_table(folder)
    name, version = str(project.get("name", folder.name)), str(project.get("version", "0"))
    info = there / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    lines = []
    for group, points in dict(project.get("entry-points", {})).items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [str((folder / root).resolve()) for root in _ROOTS if (folder / root).is_dir()]


def _read_project_table(folder: Path) -> Mapping[str, Any]:
    file = folder / "pyproject.toml"
    try:
        read = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(
            f"{_format_printable_path(folder)} is not a distribution: no pyproject.toml"
        ) from None
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {_format_printable_path(file)}: {error}") from error
    project = read.get("project")
    if not isinstance(project, dict):
        raise SpecError(f"{_format_printable_path(file)} has no [project] table")
    return project


def _require_named_packages(values: set[str], path: Path) -> None:
    """Checks that the packages exist, so that a missing one is not reported as a failed import."""
    for package in sorted({value.partition(":")[0].partition(".")[0] for value in values}):
        if PathFinder.find_spec(package) is None:
            where = (
                f"{_format_printable_path(path)} or its src/"
                if path.is_dir()
                else _format_printable_path(path)
            )
            raise PluginError(
                f"{where} has no module '{escape_unprintable(package)}', which its entry "
                "points name. "
                "If it lies elsewhere, build a wheel and check that: `pip wheel --no-deps PATH`"
            )


def _format_printable_path(path: Path) -> str:
    return escape_unprintable(str(path))
