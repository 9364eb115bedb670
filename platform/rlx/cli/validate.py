"""`rlx validate`: checks experiments without running them; shows their values and their schema."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from rlx.cli.output import print_json, print_report, print_text
from rlx.cli.verb_group import format_error_text, json_option, overrides_option
from rlx.discovery import ExperimentPlugins, list_installed_plugins
from rlx.errors import RlxError, SpecError
from rlx.importing import forbid_downloads
from rlx.plan import check_file, find_missing_parts, require_showable_texts
from rlx.spec import PROFILES, ExperimentSpec
from rlx.spec.reading import (
    Diagnostic,
    InvalidSpec,
    LoadedSpec,
    format_diagnostic,
    list_leaf_values,
)
from rlx.text import escape_unprintable
from rlx_registry import RunRecord, fill_plugin_options

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("specs", nargs=-1, type=_FILE, metavar="SPEC...")
@overrides_option("PATH.TO.KEY=VALUE")
@click.option("--values", is_flag=True, help="Print every value with its origin.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema, for editors.")
@json_option
def validate(
    specs: tuple[Path, ...], overrides: tuple[str, ...], values: bool, schema: bool, as_json: bool
) -> int:
    """Report every error in experiment files. Runs and downloads nothing, does not import torch.

    With --values, print the one experiment in full, each value with its origin: a line of the file,
    `--set`, `default`, `plugin default`, or `profile NAME`.

    With --schema, print the JSON Schema of experiments, with the names of installed plugins. To
    use it, put `# yaml-language-server: $schema=FILE` in the first line of a YAML file.
    """
    if schema and (specs or values):
        raise SpecError("--schema is of every experiment: name no file")
    forbid_downloads()
    if schema:
        from rlx.spec import experiment_schema  # imported here: it parses the models' source

        names: dict[str, list[str]] = {}
        for plugin in list_installed_plugins():
            names.setdefault(plugin.kind, []).append(plugin.name)
        print_json(experiment_schema(names))
        return 0
    if values:
        if len(specs) != 1:
            raise SpecError("--values shows one experiment: name one file")
        show_values(_collect_values(*check_file(specs[0], overrides)), as_json=as_json)
        return 0
    if not specs:
        raise click.MissingParameter(param_hint="'SPEC...'", param_type="argument")
    outcomes = [(path, _check_spec_file(path, overrides)) for path in specs]
    if as_json:
        print_json({"files": [_build_outcome_json(*outcome) for outcome in outcomes]})
    else:
        for path, outcome in outcomes:
            _print_spec_outcome(path, outcome)
    codes = [outcome.exit_code for _, outcome in outcomes if isinstance(outcome, RlxError)]
    return min(codes, default=0)


Outcome = tuple[LoadedSpec, ExperimentPlugins] | RlxError


def _check_spec_file(path: Path, overrides: tuple[str, ...]) -> Outcome:
    try:
        read, plugins = check_file(path, overrides)
        require_showable_texts(read, plugins)
        missing = find_missing_parts(read, plugins)
        return read, replace(plugins, warnings=(*plugins.warnings, *missing))
    except RlxError as error:
        return error


def _print_spec_outcome(path: Path, outcome: Outcome) -> None:
    if isinstance(outcome, RlxError):
        print_report(format_error_text(outcome) + "\n")
        return
    read, plugins = outcome
    for warning in plugins.warnings:
        print_report(format_diagnostic(warning, str(path)) + "\n")
    steps = "1 step" if read.spec.steps == 1 else f"{read.spec.steps} steps"
    print_text(
        f"{escape_unprintable(str(path))}: ok  spec {plugins.compute_digest(read.spec)}, {steps}"
    )


def _build_outcome_json(path: Path, outcome: Outcome) -> dict[str, Any]:
    entry: dict[str, Any] = {"file": str(path), "ok": not isinstance(outcome, RlxError)}
    found: Sequence[Diagnostic]
    if isinstance(outcome, RlxError):
        entry["exit_code"] = outcome.exit_code
        file = Diagnostic(kind="file", message=str(outcome))
        found = outcome.diagnostics if isinstance(outcome, InvalidSpec) else [file]
    else:
        read, plugins = outcome
        entry |= {"exit_code": 0, "digest": plugins.compute_digest(read.spec)}
        found = plugins.warnings
    return entry | {"diagnostics": [one.to_json() for one in found]}


class ShownExperiment(NamedTuple):
    """An experiment in full: `spec` under its YAML keys, without what plugins filled in, and every
    value by its dotted path, with `origins` where it comes from."""

    spec: dict[str, Any]
    digest: str
    values: dict[str, Any]
    origins: dict[str, str]


def show_values(shown: ShownExperiment, *, as_json: bool) -> None:
    if as_json:
        return print_json(shown._asdict())
    order = {key: place for place, key in enumerate(ExperimentSpec.model_fields)}
    values, origins = shown.values, shown.origins
    paths = sorted(values, key=lambda path: order[path.split(".")[0]])
    rows = [(p, json.dumps(values[p], ensure_ascii=False), f"# {origins[p]}") for p in paths]
    from rich.table import Column

    from rlx.cli.console import open_console
    from rlx.cli.tables import print_table

    # Keys and origins stay whole where there is room; the values are what is wrapped.
    room = open_console().width - 4
    key = min(max(map(len, paths)), room * 3 // 5)
    origin = min(max(len(row[2]) for row in rows), (room - key) * 3 // 5)
    print_table(Column(width=key), "", Column(width=origin), rows=rows)
    return print_text(f"\nspec {shown.digest}, seed {shown.spec['seed']}")


def _collect_values(read: LoadedSpec, plugins: ExperimentPlugins) -> ShownExperiment:
    tree, profile = read.spec.dump_resolved(), read.spec.credit.profile
    records = [asdict(origin) for origin in plugins.provenance]
    values = dict(list_leaf_values(fill_plugin_options(tree, records)))
    origins = dict.fromkeys(values, "plugin default")
    for path in values:
        section, _, option = path.partition(".")
        if section in ("estimator", "mask") and option in PROFILES[profile]:
            origins[path] = f"profile {profile}"
    origins |= read.origins
    return ShownExperiment(tree, plugins.compute_digest(read.spec), values, origins)


def collect_run_values(run: RunRecord) -> ShownExperiment:
    """The experiment of a run as it was recorded."""
    values, recorded = dict(list_leaf_values(run.settings)), run.origins or {}
    lacking = "plugin default" if recorded else "not recorded"
    origins = {path: recorded.get(path, lacking) for path in values}
    return ShownExperiment(run.spec, run.digest, values, origins)
