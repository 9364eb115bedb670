"""Command line of rlx: the `rlx` commands and their exit codes.

This package may import every other rlx package; each command imports only what it needs. Results
go to stdout, everything else to stderr. Exit codes are those of `rlx.errors`; 2 also means wrong
usage, 130 an interrupt. A traceback is printed only with RLX_DEBUG=1; that of an unexpected error
is always saved in a file.
"""

import gc
import os
import sys
from collections.abc import Sequence

import rlx

__all__ = ["main"]

COLLECT_AFTER = 50_000
"""Objects between two searches for garbage. Imports make many, and hardly any becomes garbage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: without the program name; None takes those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    gc.set_threshold(COLLECT_AFTER)
    for name in ("stdout", "stderr"):  # a process may be started without them (`>&-`)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    if arguments == ["--version"]:
        print(f"rlx {rlx.__version__}")
        return 0
    try:
        from rlx.cli.interrupts import watch_interrupts

        with watch_interrupts() as interrupts:
            from rlx.cli.verb_group import (
                rlx_command,
                run_guarded,  # after --version: importing click is slow
            )

            return run_guarded(rlx_command, arguments, interrupts)
    except KeyboardInterrupt:  # during an import, or while an error is reported
        print("interrupted", file=sys.stderr)
        return 130
