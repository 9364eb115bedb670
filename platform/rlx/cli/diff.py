"""`rlx diff`: shows how two runs or experiments differ."""

import json
from typing import Any

import click

from rlx.cli.options import json_option, registry_option
from rlx.cli.output import print_json, print_text
from rlx.results import find_side_differences, load_diff_side
from rlx.text import escape_unprintable

__all__ = ["diff"]


@click.command()
@click.argument("one", metavar="RUN|FILE")
@click.argument("other", metavar="RUN|FILE")
@json_option
@registry_option
def diff(one: str, other: str, as_json: bool, url: str) -> None:
    """Show in what two runs or experiments differ, and in what they agree.

    Compares seed, experiment, plugins (by their code), data (by what was read), rlx's own code, and
    environment. A FILE is compared with the plugins, code and packages installed here.
    """
    sides = [load_diff_side(name, url) for name in (one, other)]
    found = find_side_differences(*sides)
    if as_json:
        report = {"sides": [side.name for side in sides], "differences": found}
        print_json(report)
        return
    from rlx.cli.console import print_table

    names = [escape_unprintable(side.name) for side in sides]
    for section, differ in found.items():
        if not differ:
            print_text(f"{section}: the same")
            continue
        print_text(f"{section}: {len(differ)} different")
        rows = [
            (f"  {escape_unprintable(path)}", *map(_format_value, pair))
            for path, pair in differ.items()
        ]
        print_table("", *names, rows=rows)


def _format_value(value: Any) -> str:
    text = "–" if value is None else value if isinstance(value, str) else json.dumps(value)
    return escape_unprintable(text)
