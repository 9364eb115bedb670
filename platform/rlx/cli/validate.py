"""`rlx validate`, `rlx show`, `rlx schema`: check and show experiments without running them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from rlx.checks import check_file, check_texts
from rlx.cli.failures import format_error_text
from rlx.cli.options import overrides_option
from rlx.cli.output import format_json, print_report, print_text
from rlx.cli.text import format_columns
from rlx.discovery import ExperimentPlugins, list_installed_plugins
from rlx.errors import RlxError, SpecError
from rlx.plugin import Plugin
from rlx.spec import PROFILES, ExperimentSpec
from rlx.spec.reading import (
    Diagnostic,
    InvalidSpec,
    LoadedSpec,
    build_refusal,
    format_diagnostic,
    locate_diagnostic,
)
from rlx.text import escape_unprintable
from rlx.writing import write_text_file

__all__ = ["schema", "show", "validate"]

_SPEC = click.Path(path_type=Path)
_OVERRIDES = overrides_option("PATH.TO.KEY=VALUE")


@click.command()
@click.argument("specs", nargs=-1, required=True, type=_SPEC, metavar="SPEC...")
@_OVERRIDES
@click.option("--format", "form", type=click.Choice(["text", "json", "github"]), default="text")
def validate(specs: tuple[Path, ...], overrides: tuple[str, ...], form: str) -> int:
    """Report every error in experiment files. Runs nothing, does not import torch."""
    outcomes = [(path, _check_spec_file(path, overrides)) for path in specs]
    if form == "json":
        entries = [_build_outcome_json(path, outcome) for path, outcome in outcomes]
        print_text(format_json({"files": entries}, indent=2))
    for path, outcome in outcomes:
        if form == "github":
            print_text(
                "".join(
                    f"{_format_github_annotation(path, d)}\n"
                    for d in _list_spec_diagnostics(outcome)
                ),
                nl=False,
            )
        elif form == "text":
            _print_spec_outcome(path, outcome)
    codes = [outcome.exit_code for _, outcome in outcomes if isinstance(outcome, RlxError)]
    return min(codes, default=0)


Outcome = tuple[LoadedSpec, ExperimentPlugins] | RlxError


def _check_spec_file(path: Path, overrides: tuple[str, ...]) -> Outcome:
    try:
        read, plugins = check_file(path, overrides)
        _refuse_unwritable_texts(read, plugins)
        return read, plugins
    except RlxError as error:
        return error


def _refuse_unwritable_texts(read: LoadedSpec, plugins: ExperimentPlugins) -> None:
    """Refuses an experiment whose first problems its tiny model cannot be shown.

    Raises:
        InvalidSpec: lists what cannot be shown.
    """
    found = check_texts(read.spec, plugins, thorough=False)
    faults = [locate_diagnostic(f, read.document) for f in found if f.kind != "machine"]
    if faults:
        raise build_refusal(faults, read.document.file)


def _print_spec_outcome(path: Path, outcome: Outcome) -> None:
    if isinstance(outcome, RlxError):
        print_report(format_error_text(outcome) + "\n")
        return
    read, plugins = outcome
    for warning in plugins.warnings:
        print_report(format_diagnostic(warning, str(path)) + "\n")
    steps = "1 step" if read.spec.steps == 1 else f"{read.spec.steps} steps"
    print_text(f"{escape_unprintable(str(path))}: ok  spec {read.spec.digest}, {steps}")


def _list_spec_diagnostics(outcome: Outcome) -> tuple[Diagnostic, ...]:
    if isinstance(outcome, InvalidSpec):
        return outcome.diagnostics
    if isinstance(outcome, RlxError):
        return (Diagnostic(kind="file", message=str(outcome)),)
    return outcome[1].warnings


def _build_outcome_json(path: Path, outcome: Outcome) -> dict[str, Any]:
    diagnostics = [found.to_json() for found in _list_spec_diagnostics(outcome)]
    entry: dict[str, Any] = {"file": str(path), "ok": not isinstance(outcome, RlxError)}
    if isinstance(outcome, RlxError):
        return entry | {"exit_code": outcome.exit_code, "diagnostics": diagnostics}
    return entry | {"exit_code": 0, "digest": outcome[0].spec.digest, "diagnostics": diagnostics}


def _format_github_annotation(path: Path, diagnostic: Diagnostic) -> str:
    """Formats a diagnostic as a workflow command of GitHub Actions."""
    place = diagnostic.position
    where = [f"file={_escape_annotation_text(str(path))}"]
    if place is not None and place.file == str(path):
        where += [
            f"line={place.line}",
            f"col={place.column}",
            f"endColumn={place.column + place.width}",
        ]
    text = ". ".join([diagnostic.message, *diagnostic.helps])
    message = _escape_annotation_text(text, in_property=False)
    return f"::{diagnostic.severity} {','.join(where)}::{message}"


def _escape_annotation_text(text: str, *, in_property: bool = True) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else escape_unprintable(text)


@click.command()
@click.argument("spec", type=_SPEC, metavar="SPEC")
@_OVERRIDES
@click.option(
    "--json", "as_json", is_flag=True, help="Print the resolved spec, values and origins as JSON."
)
def show(spec: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show an experiment in full, each value with its origin.

    An origin is a line of the file, `--set`, `default`, `plugin default`, or `profile NAME`.
    """
    read, plugins = check_file(spec, overrides)
    values = {path: _get_resolved_value(read, path) for path in read.origins}
    origins = dict(read.origins)
    for path, value in _plugin_defaults(plugins).items():
        if path not in values:
            values[path], origins[path] = value, _describe_default_origin(path, read.spec)
    if as_json:
        document = {
            "spec": read.spec.dump_resolved(),
            "digest": read.spec.digest,
            "values": values,
            "origins": origins,
        }
        print_text(format_json(document, indent=2))
        return
    order = {key: place for place, key in enumerate(ExperimentSpec.model_fields)}
    paths = sorted(values, key=lambda path: order[path.split(".")[0]])
    rows = [(p, json.dumps(values[p], ensure_ascii=False), f"# {origins[p]}") for p in paths]
    print_text(format_columns(rows))
    print_text(f"\nspec {read.spec.digest}, seed {read.spec.seed}")


def _get_resolved_value(read: LoadedSpec, path: str) -> Any:
    node: Any = read.spec.dump_resolved()
    for step in read.paths[path]:
        node = node[step]
    return node


def _describe_default_origin(path: str, spec: ExperimentSpec) -> str:
    """Returns the origin of a plugin option that the YAML leaves out."""
    section, *_, option = path.split(".")
    profile = spec.credit.profile
    by_profile = section in ("estimator", "mask") and option in PROFILES[profile]
    return f"profile {profile}" if by_profile else "plugin default"


def _plugin_defaults(plugins: ExperimentPlugins) -> dict[str, Any]:
    """Returns every option of every plugin, by its path in YAML."""
    rewards = {f"rewards.{s}.{name}": made for (s, name), made in plugins.rewards.items()}
    places = {"task": plugins.task, **rewards, "mask": plugins.mask, "estimator": plugins.estimator}
    for origin, plugin in zip(plugins.provenance, plugins.named, strict=True):
        if origin.kind == "placement":
            places["credit.placement"] = plugin
    if plugins.environment is not None:
        places["rollout.environment"] = plugins.environment
    return dict(o for place, plugin in places.items() for o in _list_plugin_options(place, plugin))


def _list_plugin_options(place: str, plugin: Plugin) -> Iterator[tuple[str, Any]]:
    """Yields path and value of the options of a plugin and of the plugins nested in it."""
    yield from _flatten_options(plugin.model_dump(mode="json", by_alias=True), f"{place}.")
    for option in plugin.nested:
        for key, held in plugin.inner(option).items():
            yield from _list_plugin_options(f"{place}.{option}.{key}", held)


def _flatten_options(options: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    flat = []
    for key, value in options.items():
        path = f"{before}{key}"
        flat += (
            _flatten_options(value, f"{path}.")
            if isinstance(value, dict) and value
            else [(path, value)]
        )
    return flat


@click.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout."
)
def schema(output: Path | None) -> None:
    """Write the JSON Schema of experiments, for editors.

    To use it, put `# yaml-language-server: $schema=FILE` in the first line of a YAML file.
    """
    from rlx.spec import experiment_schema  # imported here: it parses the models' source

    names: dict[str, list[str]] = {}
    for found in list_installed_plugins():
        names.setdefault(found.kind, []).append(found.name)
    text = format_json(experiment_schema(names), indent=2) + "\n"
    if output is None:
        print_text(text, nl=False)
        return
    if output.is_dir():
        raise SpecError(f"-o {escape_unprintable(str(output))} is a folder; name a file in it")
    write_text_file(output, text)
    print_text(f"wrote {escape_unprintable(str(output))}", err=True)
