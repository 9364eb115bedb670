"""The verbs of `rlx`. The only room that may import every other; each verb imports its own.

Results go to stdout, everything else to stderr. Exit codes are those of `rlx.errors`; 2 is also
wrong usage, 130 an interrupt. A traceback is shown only with RLX_DEBUG=1, and always kept.
"""

import os
import sys
from collections.abc import Sequence

import rlx

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code.

    Args:
        arguments: without the program's name; those of the process when None.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    if arguments == ["--version"]:
        print(f"rlx {rlx.__version__}")
        return 0
    try:
        from rlx.cli.failures import run_guarded  # after the quick answer: click takes a moment
        from rlx.cli.verb_group import rlx_command

        return run_guarded(rlx_command, arguments)
    except KeyboardInterrupt:  # while importing, or while saying what went wrong
        print("interrupted", file=sys.stderr)
        return 130


def _open_streams() -> None:
    """Gives a process that was started without stdout or stderr (`>&-`) somewhere to write."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
