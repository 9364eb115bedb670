"""`rlx doctor`: reports what experiments need that this machine has or lacks, with fixes."""

import os
from dataclasses import asdict

import click

from rlx.cli.options import DEFAULT, json_option
from rlx.cli.output import print_json, print_text
from rlx.plan import inspect_machine

__all__ = ["doctor"]

SIGNS = {"ok": "✓", "broken": "✗", "absent": "–"}


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Show what this machine has and lacks, and how to fix it.

    The exit code is 0 when an experiment with the built-in defaults can run here, else 4.
    """
    parts = tuple(inspect_machine(os.environ.get("RLX_REGISTRY") or DEFAULT))
    findings = [part.finding for part in parts if part.finding]
    ready = not any(finding.severity == "error" for finding in findings)
    if as_json:
        report = {"ready": ready, "findings": [asdict(part) for part in parts]}
        print_json(report)
    else:
        from rlx.cli.console import print_table

        rows = [
            (SIGNS[part.state], part.name, part.found + (f"\n→ {part.fix}" if part.fix else ""))
            for part in parts
        ]
        print_table("", "", "", rows=rows)
        ending = "experiments can run here" if ready else "experiments cannot run here: see ✗"
        print_text(f"\n{ending}")
    return 0 if ready else 4
