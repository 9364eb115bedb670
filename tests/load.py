"""Runs tests on a crowded machine: `python tests/load.py --times 3 -- make test`.

Busy processes and disk writes go on while a command runs, as often as asked. What comes after `--`
is the command, by default `make test`. The exit code is that of the first run that fails, or 0.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITTEN = 32 * 2**20
"""Bytes that a writer writes again and again."""


def keep_busy() -> None:
    """Computes until it or its parent is killed."""
    while multiprocessing.parent_process().is_alive():
        sum(range(100_000))


def keep_writing(folder: str) -> None:
    """Writes a file to the disk until it or its parent is killed."""
    content = os.urandom(WRITTEN)
    path = Path(folder, str(os.getpid()))
    while multiprocessing.parent_process().is_alive():
        with path.open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())


@contextmanager
def crowd_machine(busy: int, writing: int) -> Iterator[None]:
    """Keeps processors and the disk busy until the block ends."""
    spawn = multiprocessing.get_context("spawn")
    # Not in /tmp, which may be in memory.
    with tempfile.TemporaryDirectory(prefix=".load-", dir=Path.cwd()) as folder:
        processes = [spawn.Process(target=keep_busy, daemon=True) for _ in range(busy)]
        processes += [
            spawn.Process(target=keep_writing, args=(folder,), daemon=True) for _ in range(writing)
        ]
        try:
            for process in processes:
                process.start()
            yield
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def main() -> int:
    """Runs pytest beside the load; prints how crowded the machine was."""
    cores = os.cpu_count() or 1
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--times", type=int, default=3, help="runs of the tests (%(default)s)")
    reader.add_argument(
        "--busy", type=int, default=6 * cores, help="busy processes, six per core (%(default)s)"
    )
    reader.add_argument("--writing", type=int, default=2, help="writing processes (%(default)s)")
    reader.add_argument("command", nargs="*", default=["make", "test"], help="after --")
    given = reader.parse_args()
    first_failure = 0
    with crowd_machine(given.busy, given.writing):
        for number in range(1, given.times + 1):
            code = subprocess.run(given.command).returncode
            load = os.getloadavg()[0]
            print(f"run {number} of {given.times}: exit code {code}, load {load:.1f}", flush=True)
            first_failure = first_failure or code
    return first_failure


if __name__ == "__main__":
    sys.exit(main())
