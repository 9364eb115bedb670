"""`python -m rlx.testing.golden FILE [--json]`, or `--functions`."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlx.errors import RlxError
from rlx.testing.golden.check import GoldenFinding, check_golden_record
from rlx.testing.golden.functions import list_golden_functions
from rlx.testing.golden.record import GoldenRecord, GoldenRecords, read_golden_records
from rlx.testing.golden.values import list_input_names
from rlx.text import escape_unprintable

__all__ = ["main"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--functions", is_flag=True, help="List the functions that a record may name.")
def main(file: Path | None, as_json: bool, functions: bool) -> None:
    """Recompute the worked examples of FILE and compare them.

    Exits with 0 only if every output agrees and none is unknown.
    """
    if functions:
        _show_functions()
        return
    if file is None:
        raise click.UsageError("name a file of records, or use --functions")
    try:
        records = read_golden_records(file)
    except RlxError as error:
        click.echo(f"error: {escape_unprintable(str(error))}", err=True)
        raise SystemExit(error.exit_code) from None
    found = [(record, _list_record_findings(record, records)) for record in records.examples]
    if as_json:
        click.echo(json.dumps(_as_json(found), indent=2, default=repr))
    else:
        for record, findings in found:
            _show_record(record, findings)
        click.echo(_format_summary(found))
    bad = any(f.status in ("differs", "unknown") for _, findings in found for f in findings)
    raise SystemExit(1 if bad or not found else 0)


def _show_functions() -> None:
    for function in list_golden_functions():
        click.echo(escape_unprintable(f"{function.name}{function.parameters}"))
        click.echo(escape_unprintable(f"    {function.summary}"))
    for argument, names in list_input_names().items():
        click.echo(f"{argument}: {', '.join(names)}")


def _list_record_findings(record: GoldenRecord, records: GoldenRecords) -> list[GoldenFinding]:
    return list(check_golden_record(record, rtol=records.rtol, atol=records.atol))


def _show_record(record: GoldenRecord, findings: Iterable[GoldenFinding]) -> None:
    click.echo(escape_unprintable(f"{record.id}  {record.function}  {record.title}"))
    for finding in findings:
        click.echo(escape_unprintable(f"  {finding.status:8}{finding.output}"))
        if finding.reason is None:
            click.echo(
                escape_unprintable(f"            got       {_format_output_value(finding.got)}")
            )
        click.echo(
            escape_unprintable(f"            expected  {_format_output_value(finding.expected)}")
        )
        if finding.reason is not None:
            click.echo(escape_unprintable(f"            {finding.reason}"))


def _format_output_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{key}: {_format_output_value(v)}" for key, v in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_output_value, value)) + "]"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _count_statuses(found: list[tuple[GoldenRecord, list[GoldenFinding]]]) -> Counter[str]:
    return Counter(f.status for _, findings in found for f in findings)


def _format_summary(found: list[tuple[GoldenRecord, list[GoldenFinding]]]) -> str:
    counts = _count_statuses(found)
    summary = ", ".join(f"{counts[s]} {s}" for s in ("ok", "differs", "unknown"))
    bad = [
        record.id
        for record, findings in found
        if any(f.status in ("differs", "unknown") for f in findings)
    ]
    where = f" (in {', '.join(bad)})" if bad else ""
    return escape_unprintable(f"{len(found)} records; outputs: {summary}{where}")


def _as_json(found: list[tuple[GoldenRecord, list[GoldenFinding]]]) -> dict[str, Any]:
    return {
        "counts": dict(_count_statuses(found)),
        "records": [
            {
                "id": record.id,
                "function": record.function,
                "title": record.title,
                "outputs": [
                    {k: v for k, v in asdict(f).items() if k != "record"} for f in findings
                ],
            }
            for record, findings in found
        ],
    }


if __name__ == "__main__":
    main()
