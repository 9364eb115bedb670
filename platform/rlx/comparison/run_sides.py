"""How two runs or experiments differ: seed, spec, plugins, data, code and environment."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.launch import collect_code_version, collect_environment_versions, open_registry
from rlx.plan import check_read_spec, read_spec
from rlx_registry import RunRecord, fill_plugin_options

__all__ = ["DiffSide", "build_run_side", "find_side_differences", "load_diff_side"]

SECTIONS = ("seed", "spec", "plugins", "data", "code", "environment")
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
    return _build_diff_side(run.id, run.settings, run.plugins, run.code, run.environment)


def load_diff_side(name: str, url: str) -> DiffSide:
    """Loads the side of a run, or of an experiment file with what is installed here.

    Raises:
        InvalidSpec: the file is no valid experiment.
        SpecError: there is no such run.
    """
    path = Path(name)
    if not path.is_file():
        with open_registry(url) as registry:
            return build_run_side(registry.run(name))
    read = read_spec(path)
    plugins = check_read_spec(read)
    used = plugins.list_records()
    return _build_diff_side(
        name,
        fill_plugin_options(read.spec.dump_resolved(), used),
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
