"""`rlx validate`, `rlx show`, `rlx schema`: what an experiment says, without running it."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlx.cli.failure import sentence
from rlx.cli.text import columns, paint
from rlx.discovery import Plugins, check_file, installed
from rlx.errors import EnvironmentFault, RlxError, SpecError
from rlx.plugin import Plugin
from rlx.spec.credit import PROFILES
from rlx.spec.diagnostic import Diagnostic, InvalidSpec, dotted, printable, render
from rlx.spec.experiment import ExperimentSpec
from rlx.spec.reader import ReadSpec

__all__ = ["schema", "show", "validate"]

_SPEC = click.Path(path_type=Path)
_OVERRIDES = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH.TO.KEY=VALUE",
    help="Change one value; may be repeated.",
)


@click.command()
@click.argument("specs", nargs=-1, required=True, type=_SPEC, metavar="SPEC...")
@_OVERRIDES
@click.option("--format", "form", type=click.Choice(["text", "json", "github"]), default="text")
def validate(specs: tuple[Path, ...], overrides: tuple[str, ...], form: str) -> int:
    """Say everything that is wrong with experiments. Runs nothing, imports no torch."""
    outcomes = [(path, _outcome(path, overrides)) for path in specs]
    if form == "json":
        entries = [_entry(path, outcome) for path, outcome in outcomes]
        click.echo(json.dumps({"files": entries}, indent=2))
    for path, outcome in outcomes:
        if form == "github":
            click.echo(
                "".join(f"{_annotation(path, d)}\n" for d in _diagnostics(outcome)), nl=False
            )
        elif form == "text":
            _tell(path, outcome)
    codes = [outcome.exit_code for _, outcome in outcomes if isinstance(outcome, RlxError)]
    return min(codes, default=0)


Outcome = tuple[ReadSpec, Plugins] | RlxError


def _outcome(path: Path, overrides: tuple[str, ...]) -> Outcome:
    try:
        return check_file(path, overrides)
    except RlxError as error:
        return error


def _tell(path: Path, outcome: Outcome) -> None:
    if isinstance(outcome, RlxError):
        click.echo(paint(sentence(outcome), sys.stderr) + "\n", err=True)
        return
    read, plugins = outcome
    for warning in plugins.warnings:
        click.echo(paint(render(warning, str(path)), sys.stderr) + "\n", err=True)
    steps = "1 step" if read.spec.steps == 1 else f"{read.spec.steps} steps"
    click.echo(f"{printable(str(path))}: ok  spec {read.spec.digest}, {steps}")


def _diagnostics(outcome: Outcome) -> tuple[Diagnostic, ...]:
    if isinstance(outcome, InvalidSpec):
        return outcome.diagnostics
    if isinstance(outcome, RlxError):
        return (Diagnostic(kind="file", message=str(outcome)),)
    return outcome[1].warnings


def _entry(path: Path, outcome: Outcome) -> dict[str, Any]:
    told = [
        asdict(d) | {"path": dotted(d.path), "against": dotted(d.against)}
        for d in _diagnostics(outcome)
    ]
    entry: dict[str, Any] = {"file": str(path), "ok": not isinstance(outcome, RlxError)}
    if isinstance(outcome, RlxError):
        return entry | {"exit_code": outcome.exit_code, "diagnostics": told}
    return entry | {"exit_code": 0, "digest": outcome[0].spec.digest, "diagnostics": told}


def _annotation(path: Path, diagnostic: Diagnostic) -> str:
    """One workflow command of GitHub Actions."""
    place = diagnostic.position
    where = [f"file={_escaped(str(path))}"]
    if place is not None and place.file == str(path):
        where += [
            f"line={place.line}",
            f"col={place.column}",
            f"endColumn={place.column + place.width}",
        ]
    text = ". ".join([diagnostic.message, *diagnostic.helps])
    return f"::{diagnostic.severity} {','.join(where)}::{_escaped(text, in_property=False)}"


def _escaped(text: str, *, in_property: bool = True) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else printable(text)


@click.command()
@click.argument("spec", type=_SPEC, metavar="SPEC")
@_OVERRIDES
@click.option("--json", "as_json", is_flag=True, help="The resolved spec, values and origins.")
def show(spec: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show an experiment in full, each value with its origin.

    Origins are a line of the file, `--set`, `default`, `plugin default`, or `profile NAME`.
    """
    read, plugins = check_file(spec, overrides)
    values = {path: _value(read, path) for path in read.origins}
    origins = dict(read.origins)
    for path, value in _plugin_defaults(plugins).items():
        if path not in values:
            values[path], origins[path] = value, _unsaid(path, read.spec)
    if as_json:
        said = {
            "spec": read.spec.resolved(),
            "digest": read.spec.digest,
            "values": values,
            "origins": origins,
        }
        click.echo(json.dumps(said, indent=2))
        return
    order = {key: place for place, key in enumerate(ExperimentSpec.model_fields)}
    paths = sorted(values, key=lambda path: order[path.split(".")[0]])
    rows = [(p, json.dumps(values[p], ensure_ascii=False), f"# {origins[p]}") for p in paths]
    click.echo(columns(rows))
    click.echo(f"\nspec {read.spec.digest}, seed {read.spec.seed}")


def _value(read: ReadSpec, path: str) -> Any:
    node: Any = read.spec.resolved()
    for step in read.paths[path]:
        node = node[step]
    return node


def _unsaid(path: str, spec: ExperimentSpec) -> str:
    """Who says an option of a plugin that the YAML leaves out."""
    section, *_, option = path.split(".")
    profile = spec.credit.profile
    by_profile = section == "estimator" and option in PROFILES[profile]
    return f"profile {profile}" if by_profile else "plugin default"


def _plugin_defaults(plugins: Plugins) -> dict[str, Any]:
    """Every option of every plugin, at the path where YAML would give it."""
    rewards = {f"rewards.{s}.{name}": made for (s, name), made in plugins.rewards.items()}
    places = {"task": plugins.task, **rewards, "mask": plugins.mask, "estimator": plugins.estimator}
    if plugins.environment is not None:
        places["rollout.environment"] = plugins.environment
    return dict(o for place, plugin in places.items() for o in _options(place, plugin))


def _options(place: str, plugin: Plugin) -> Iterator[tuple[str, Any]]:
    """Path and value of a plugin's options, and of those of the plugins that it holds."""
    yield from _flat(plugin.model_dump(mode="json", by_alias=True), f"{place}.")
    for option in plugin.nested:
        for key, held in plugin.inner(option).items():
            yield from _options(f"{place}.{option}.{key}", held)


def _flat(options: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    flat = []
    for key, value in options.items():
        path = f"{before}{key}"
        flat += _flat(value, f"{path}.") if isinstance(value, dict) and value else [(path, value)]
    return flat


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A file instead of stdout.")
def schema(output: Path | None) -> None:
    """Write the JSON Schema of experiments, for editors.

    In YAML: `# yaml-language-server: $schema=FILE` as the first line.
    """
    from rlx.spec.schema import experiment_schema  # only here: it reads the models' source

    names: dict[str, list[str]] = {}
    for found in installed():
        names.setdefault(found.kind, []).append(found.name)
    text = json.dumps(experiment_schema(names), indent=2) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return
    if output.is_dir():
        raise SpecError(f"-o {printable(str(output))} is a folder; name a file in it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        where = printable(str(output))
        raise EnvironmentFault(f"cannot write {where}: {error.strerror}") from error
    click.echo(f"wrote {printable(str(output))}", err=True)
