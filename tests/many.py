"""Several Python processes at once."""

import subprocess
import sys
from collections.abc import Iterable, Sequence

from patience import LIMIT

__all__ = ["processes"]


def processes(
    script: str, arguments: Iterable[Sequence[object]], timeout: float = LIMIT
) -> list[list[str]]:
    """Runs one Python process per argument list at once; returns what each printed."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, each)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in arguments
    ]
    results = [process.communicate(timeout=timeout) for process in running]
    for process, (_, errors) in zip(running, results, strict=True):
        assert process.returncode == 0, errors
    return [output.split() for output, _ in results]
