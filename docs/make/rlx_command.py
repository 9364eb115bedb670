"""Runs the rlx command line for scripts that generate pages."""

import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "rlx"]

ROOT = Path(__file__).parents[2]


def rlx(*arguments: str, quiet: bool = False) -> str:
    """Runs a command and returns its output; progress goes to the terminal.

    Raises:
        SystemExit: the command failed.
    """
    command = "import sys; from rlx.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"rlx {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}")
    if not quiet:
        print(done.stdout, end="", flush=True)
    return done.stdout
