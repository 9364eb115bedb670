"""`rlx diff`: shows how two runs or experiments differ."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from rlx.checks import check_read_spec, read_spec
from rlx.cli.output import format_json, print_text
from rlx.cli.registry import open_registry, registry_option
from rlx.cli.text import format_columns
from rlx.launch import collect_code_version, collect_environment_versions
from rlx.text import escape_unprintable
from rlx_registry import RunRecord

__all__ = ["DiffSide", "build_run_side", "diff", "find_side_differences"]

SECTIONS = ("seed", "spec", "plugins", "data", "code", "environment")
LONGEST = 60
"""Longest value that a table shows, in characters."""

Flat = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DiffSide:
    """Everything that determines the results of a run.

    Attributes:
        name: a run id, or a file.
        sections: values by dotted path, for each of `SECTIONS`.
    """

    name: str
    sections: Mapping[str, Flat]


@click.command()
@click.argument("one", metavar="RUN|FILE")
@click.argument("other", metavar="RUN|FILE")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@registry_option
def diff(one: str, other: str, as_json: bool, url: str) -> None:
    """Show in what two runs or experiments differ, and in what they agree.

    Compares seed, experiment, plugins (by their code), data (by what was read), rlx's own code, and
    environment. A FILE is compared with the plugins, code and packages installed here.
    """
    sides = [_load_diff_side(name, url) for name in (one, other)]
    found = find_side_differences(*sides)
    if as_json:
        report = {
            "sides": [side.name for side in sides],
            "differences": {
                section: {path: list(pair) for path, pair in differ.items()}
                for section, differ in found.items()
            },
        }
        print_text(format_json(report, indent=2))
        return
    names = [escape_unprintable(side.name) for side in sides]
    for section, differ in found.items():
        if not differ:
            print_text(f"{section}: the same")
            continue
        print_text(f"{section}: {len(differ)} different")
        rows = [(f"  {path}", *map(_shorten_value, pair)) for path, pair in differ.items()]
        print_text(format_columns(rows, ("", *names)))


def find_side_differences(one: DiffSide, other: DiffSide) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Returns the differing values of every section, by path; None where a side lacks the value."""
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    for section in SECTIONS:
        a, b = one.sections[section], other.sections[section]
        paths = list(dict.fromkeys([*a, *b]))
        pairs = {path: (a.get(path), b.get(path)) for path in paths}
        found[section] = {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
    return found


def build_run_side(run: RunRecord) -> DiffSide:
    """Builds the side of a run from its record."""
    return _build_diff_side(run.id, run.spec, run.plugins, run.code, run.environment)


def _load_diff_side(name: str, url: str) -> DiffSide:
    path = Path(name)
    if not path.is_file():
        with open_registry(url) as registry:
            return build_run_side(registry.run(name))
    read = read_spec(path)
    plugins = check_read_spec(read)
    used = [
        {**asdict(origin), "data": dict(plugin.data())}
        for origin, plugin in zip(plugins.provenance, plugins.named, strict=True)
    ]
    return _build_diff_side(
        name,
        read.spec.dump_resolved(),
        used,
        collect_code_version(),
        collect_environment_versions(),
    )


def _build_diff_side(
    name: str,
    spec: Mapping[str, Any],
    plugins: list[dict[str, Any]],
    code: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> DiffSide:
    own = ("distribution", "version", "entry_point", "sha256")
    code_of = {f"{p['kind']} {p['name']}": {key: p[key] for key in own} for p in plugins}
    data_of = {f"{p['kind']} {p['name']}": p.get("data") or {} for p in plugins}
    rest = {key: value for key, value in spec.items() if key != "seed"}
    parts = {
        "seed": {"seed": spec["seed"]},
        "spec": rest,
        "plugins": code_of,
        "data": data_of,
        "code": code,
        "environment": environment,
    }
    return DiffSide(
        name, {section: dict(_flatten_values(part, "")) for section, part in parts.items()}
    )


def _flatten_values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields plain values by dotted path; a list of plain values is one value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten_values(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for number, inner in enumerate(value):
            yield from _flatten_values(inner, f"{path}.{number}")
    else:
        yield path, value


def _shorten_value(value: Any) -> str:
    text = "–" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
