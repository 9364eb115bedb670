"""Coverage by room: `make coverage` writes tests/coverage.md; ARGS="tests/credit tests/loss" only
prints that of some tests.

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
from typing import Any, NamedTuple

from rich import print as show
from rich.table import Table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "coverage.md"
COUNTED = ("num_statements", "covered_lines", "num_branches", "covered_branches")
HEADINGS = ("lines", "covered", "branches", "covered")
ABOUT = """# Test coverage

Written by `make coverage`, from all tests and all processes that they start. A process that is
killed at once leaves no data: what only such a process runs counts as not covered, like what needs
a GPU. `rlx` are the modules outside its packages.
"""


def main(arguments: list[str]) -> int:
    """Runs some tests, or `make test`, and reports; returns the exit code of the tests."""
    folder = ROOT / ".coverage-data"
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "data")}

    def run(*command: str) -> int:
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode

    coverage = partial(run, sys.executable, "-m", "coverage")
    coverage("erase")
    if arguments:
        code = coverage("run", "-m", "pytest", "-q", *arguments)
    else:
        code = run("make", "test", "test-system", "PYTEST=-m coverage run -m pytest -n 2")
    coverage("combine", "--quiet")
    coverage("json", "--quiet", "-o", str(folder / "report.json"))
    rooms = count_rooms(json.loads((folder / "report.json").read_text())["files"])
    show(build_table(rooms))
    if not arguments:
        PAGE.write_text(f"{ABOUT}\n{build_markdown(rooms)}")
    return code


class RoomCoverage(NamedTuple):
    """What ran of a room; its name, and shares as texts."""

    room: str
    lines: str
    covered: str
    branches: str
    taken: str


def count_rooms(files: dict[str, Any]) -> list[RoomCoverage]:
    """Lines and branches by room, from the report of each file; the last one is of all."""
    rooms: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTED, 0))
    for path, file in files.items():
        for room in (_name_room(path), "all"):
            for count in COUNTED:
                rooms[room][count] += file["summary"][count]
    counted = []
    for room, counts in sorted(rooms.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        lines, ran, branches, taken = (counts[count] for count in COUNTED)
        shares = f"{lines:,}", _share(ran, lines), f"{branches:,}", _share(taken, branches)
        counted.append(RoomCoverage(room, *shares))
    return counted


def build_table(rooms: list[RoomCoverage]) -> Table:
    """The rooms for a terminal."""
    table = Table("room", box=None)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for room in rooms:
        table.add_row(*room)
    return table


def build_markdown(rooms: list[RoomCoverage]) -> str:
    """The rooms as a table of a page."""
    rows = [("package", *HEADINGS), ("---", *["---:"] * len(HEADINGS)), *rooms]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _name_room(path: str) -> str:
    """`rlx/credit` of any file of that package; files beside the packages are in `rlx`."""
    package, *others = Path(path).parts[1:]
    return f"{package}/{others[0]}" if len(others) > 1 else package


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
