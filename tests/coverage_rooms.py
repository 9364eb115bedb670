"""Coverage by room: `make coverage`, or ARGS="tests/credit tests/loss" for some tests.

Runs tests under coverage.py, with all the processes that they start, and prints the share of lines
and branches of each room that ran. A process that is killed at once leaves no data: what it alone
has run is missing.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from rich import print as show
from rich.table import Table

ROOT = Path(__file__).parents[1]
COUNTED = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def main(arguments: list[str]) -> int:
    """Runs some tests, or `make test`, and prints the table; returns the exit code of the tests."""
    folder = ROOT / ".coverage-data"
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "data")}

    def run(*command: str) -> int:
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode

    coverage = partial(run, sys.executable, "-m", "coverage")
    coverage("erase")
    if arguments:
        code = coverage("run", "-m", "pytest", "--forks", "-q", *arguments)
    else:
        code = run("make", "test", "PYTEST=-m coverage run -m pytest")
    coverage("combine", "--quiet")
    coverage("json", "--quiet", "-o", str(folder / "report.json"))
    show(build_table(json.loads((folder / "report.json").read_text())["files"]))
    return code


def build_table(files: dict[str, Any]) -> Table:
    """Lines and branches by room, from the report of each file."""
    rooms: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTED, 0))
    for path, file in files.items():
        for room in (_name_room(path), "all"):
            for count in COUNTED:
                rooms[room][count] += file["summary"][count]
    table = Table("room", box=None)
    for heading in ("lines", "covered", "branches", "covered"):
        table.add_column(heading, justify="right")
    for room, counts in sorted(rooms.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        lines, ran, branches, taken = (counts[count] for count in COUNTED)
        table.add_row(
            room, f"{lines:,}", _share(ran, lines), f"{branches:,}", _share(taken, branches)
        )
    return table


def _name_room(path: str) -> str:
    """`rlx/credit` of any file of that package; files beside the packages are in `rlx`."""
    package, *others = Path(path).parts[1:]
    return f"{package}/{others[0]}" if len(others) > 1 else package


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
