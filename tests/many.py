"""Several Python processes at once."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from patience import LIMIT

FORKS = """
import json, multiprocessing, os, sys
import psycopg, sqlalchemy.dialects.postgresql.psycopg, sqlalchemy.dialects.sqlite
from rlx_registry import Registry
folder, script, *lists = json.load(sys.stdin)
gate = multiprocessing.get_context("fork").Barrier(len(lists))
children = []
for number, arguments in enumerate(lists):
    child = os.fork()
    if child == 0:
        for file, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), file)
        sys.argv = ["-c", *arguments]
        exec(script, {"__name__": "__main__", "begin_together": gate.wait})
        sys.exit()
    children.append(child)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
"""Imports what the scripts do, once, and runs each in a copy; nothing has been opened before."""


def processes(
    script: str, arguments: Iterable[Sequence[object]], timeout: float = LIMIT
) -> list[list[str]]:
    """Runs one Python process per argument list at once; returns what each printed.

    Args:
        script: the program; `begin_together()` in it waits until all processes have called it.
        arguments: of each process.
        timeout: seconds for all.
    """
    lists = [[str(one) for one in each] for each in arguments]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", FORKS],
            input=json.dumps([folder, script, *lists]),
            capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = [(Path(folder) / f"{number}.out").read_text() for number in range(len(lists))]
        wrong = [(Path(folder) / f"{number}.err").read_text() for number in range(len(lists))]
    codes = done.stdout.split()
    assert codes == ["0"] * len(lists), (codes, wrong)
    return [output.split() for output in said]
