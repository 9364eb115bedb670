"""Tests wait by `wait_until`, and none of them measures time."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from patience import stop_process, wait_until

TESTS = Path(__file__).parents[1]
CLOCKS = {"sleep", "monotonic", "perf_counter"}
MEASURE = (
    "patience.py",
    "pollers.py",
    "load.py",
    "ray_group_trial.py",
    "benchmarks",
    "gpu",
)
"""The helper itself, and what measures speed without asserting it."""
MARK = "# scenario"
"""Marks a pause that is part of what is tested, such as a server that is away for a while."""


def find_clocks(source: str) -> list[str]:
    """The lines that read a clock or sleep, without those that are marked."""
    lines, found = source.splitlines(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (
            node.attr == "wait_for_timeout"
            or (node.attr in CLOCKS and ast.unparse(node.value) == "time")
        ):
            found.add(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {node.lineno for alias in node.names if alias.name in CLOCKS}
    return [lines[number - 1].strip() for number in sorted(found) if MARK not in lines[number - 1]]


def test_waits_are_patient():
    files = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    found = {
        name: clocks
        for name, path in files.items()
        if not name.startswith(MEASURE) and (clocks := find_clocks(path.read_text()))
    }
    assert not found, f"use patience.wait_until, or mark what is tested by {MARK!r}"


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(1)",
        "page.wait_for_timeout(9)",
        "assert time.monotonic() - began < 5",
        "from time import perf_counter",
    ],
)
def test_a_wait_by_hand_is_found(line):
    assert find_clocks(line) == [line]
    assert find_clocks(f"{line}  {MARK}: a slow server") == []


def test_a_wait_says_what_it_waited_for_and_what_it_saw():
    with pytest.raises(AssertionError, match=r"waited 0 s for the third; last seen: \[\]"):
        wait_until("the third", list, limit=0)
    seen = iter([0, None, "found"])
    assert wait_until("it", lambda: next(seen)) == "found"


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready" + "." * 200_000, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("own_group", [False, True])
def test_what_does_not_end_is_killed(own_group, monkeypatch):
    monkeypatch.setattr("patience.GRACE", 0.5)
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=own_group
    )
    assert process.stdout.read(5) == b"ready"
    stop_process(process)
    assert process.returncode == -9
