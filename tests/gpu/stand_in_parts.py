"""The check with parts that print two figures and then fail, take too long, or need nothing.

    python tests/gpu/stand_in_parts.py FOLDER [arguments of check.py]

Files in the folder say how often a part ran.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu import check
from part import Part, PartSkippedError

HERE = str(Path(__file__).parent)
FOLDER = Path(sys.argv.pop(1))
FIGURES = """
from figures import print_figure
print_figure("figure 1", value=1)
print_figure("figure 2", value=2)
"""
FAILS = "print('hum'); raise ValueError('no luck')"
WAITS = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""


def run_python(part: Part, code: str) -> None:
    part.run([sys.executable, "-c", f"import sys\nsys.path.insert(0, {HERE!r})\n{code}"])


def count(name: str) -> None:
    with (FOLDER / name).open("a") as file:
        file.write("x")


def run_good(part: Part) -> None:
    count("good")
    run_python(part, FIGURES)


def run_bad(part: Part) -> None:
    count("bad")
    run_python(part, f"{FIGURES}\n{FAILS}")


def run_long(part: Part) -> None:
    """Three seconds are left for a command after another one; it leaves a child in a session of
    its own."""
    run_python(part, "pass")
    part._deadline -= part._longest - 3
    command = [sys.executable, "-c", WAITS, str(FOLDER / "child")]
    start = f"subprocess.Popen({command!r}, start_new_session=True)"
    run_python(part, f"{FIGURES}\nimport subprocess\nchild = {start}\nchild.wait()")


def skip(part: Part) -> None:
    raise PartSkippedError("nothing here")


if __name__ == "__main__":
    check.PARTS = {"bad": run_bad, "good": run_good, "long": run_long, "skipped": skip}
    check.compute_sources_digest = lambda: "same"
    sys.exit(check.main())
