"""`rlx validate` and `rlx schema`: check experiments without running them."""

from pathlib import Path
from typing import Any

import click

from rlx.cli.failures import format_error_text
from rlx.cli.options import overrides_option
from rlx.cli.output import format_json, print_json, print_report, print_text
from rlx.discovery import ExperimentPlugins, load_all_plugins
from rlx.errors import RlxError, SpecError
from rlx.plan import check_file, require_showable_texts
from rlx.spec.reading import (
    Diagnostic,
    InvalidSpec,
    LoadedSpec,
    format_diagnostic,
)
from rlx.text import escape_unprintable
from rlx.writing import write_text_file

__all__ = ["schema", "validate"]

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
        print_json({"files": entries})
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
        require_showable_texts(read, plugins)
        return read, plugins
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
    read, plugins = outcome
    digest = plugins.compute_digest(read.spec)
    return entry | {"exit_code": 0, "digest": digest, "diagnostics": diagnostics}


def _format_github_annotation(path: Path, diagnostic: Diagnostic) -> str:
    """Formats a diagnostic as a workflow command of GitHub Actions."""
    place = diagnostic.position
    is_written = place is not None and Path(place.file).is_file()
    where = [f"file={_escape_annotation_text(place.file if place and is_written else str(path))}"]
    if place is not None and is_written:
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
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write to this file instead of stdout."
)
def schema(output: Path | None) -> None:
    """Write the JSON Schema of experiments, with the options of installed plugins, for editors.

    To use it, put `# yaml-language-server: $schema=FILE` in the first line of a YAML file.
    """
    from rlx.spec import experiment_schema  # imported here: it parses the models' source

    text = format_json(experiment_schema(load_all_plugins()), indent=2) + "\n"
    if output is None:
        print_text(text, nl=False)
        return
    if output.is_dir():
        raise SpecError(f"-o {escape_unprintable(str(output))} is a folder; name a file in it")
    write_text_file(output, text)
    print_text(f"wrote {escape_unprintable(str(output))}", err=True)
