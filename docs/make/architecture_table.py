"""`make docs`: writes tests/learner/architectures.md, from small models that are tried.

python docs/make/architecture_table.py
"""

import runpy
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests" / "learner"
PAGE = TESTS / "architectures.md"
HEAD = """# Architectures

Written by `make docs`: model types of transformers that a test samples from and trains, and how.
[Use your own model](../../docs/models_and_data.md#architectures) explains the columns.
"""


def build_table(models: Mapping[str, Mapping[str, str]]) -> str:
    """The table, from how each model type is sampled from and trained."""
    lines = ["| model type | sampler | learner |", "| --- | --- | --- |"]
    for kind, found in sorted(models.items()):
        is_compact = found["sampler"].startswith("compact decoder")
        sampler = "compact decoder" if is_compact else "the model itself, with its cache"
        lines.append(f"| `{kind}` | {sampler} | {found['learner']} |")
    return "\n".join(lines)


def build_page() -> str:
    """The page, from models tried now."""
    measure = runpy.run_path(str(TESTS / "measure_architectures.py"))["measure_architectures"]
    return f"{HEAD}\n{build_table(measure())}\n"


if __name__ == "__main__":
    PAGE.write_text(build_page())
