"""`make docs`: writes tests/learner/architectures.md, from steps taken.

    python docs/make/architecture_table.py

It runs `tests/learner/measure_architectures.py`, which samples from and trains a small model of
every architecture.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[2]
PAGE = HOME / "tests" / "learner" / "architectures.md"
MEASURE = HOME / "tests" / "learner" / "measure_architectures.py"
HEAD = """# Architectures

Written by `make docs`: model types of transformers that a test samples from and trains, and how.
[Use your own model](../../docs/models_and_data.md#architectures) explains the columns.
"""


def build_table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """The table, from the figures of every model type."""
    lines = ["| model type | sampler | learner |", "| --- | --- | --- |"]
    for kind, found in sorted(models.items()):
        sampler = "the model itself, with its cache"
        if found["sampler"].startswith("compact decoder"):
            sampler = "compact decoder"
        elif "over the whole dialogue" in found["sampler"]:
            sampler = "the model itself, without a cache"
        lines.append(f"| `{kind}` | {sampler} | {found['learner']} |")
    return "\n".join(lines)


def read_table() -> str:
    """The table as it stands in the page."""
    return PAGE.read_text().removeprefix(HEAD).strip()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        subprocess.run([sys.executable, str(MEASURE), str(out)], check=True)
        table = build_table(json.loads(out.read_text())["models"])
    PAGE.write_text(f"{HEAD}\n{table}\n")


if __name__ == "__main__":
    main()
