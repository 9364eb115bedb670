"""`make docs`: writes tests/learner/architectures.md, from steps taken.

    python docs/make/architecture_table.py

It runs `tests/learner/measure_architectures.py`, which samples from and trains a small model of
every architecture. The column of vLLM comes from figures that
`tests/learner/measure_vllm_architectures.py` has stored.
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
IN_VLLM = HOME / "tests" / "learner" / "vllm_architectures.json"
APART = 0.1
"""Nats at a token, by which an engine in float32 cannot differ and be right."""
LONGEST = 100
"""Characters of a reason."""
HEAD = """# Architectures

Written by `make docs`: model types of transformers that a test samples from and trains, and how.
[Use your own model](../../docs/models_and_data.md#architectures) explains the columns.
"""


def build_table(
    models: Mapping[str, Mapping[str, Any]], in_vllm: Mapping[str, Mapping[str, Any]]
) -> str:
    """The table, from the figures of every model type."""
    lines = ["| model type | sampler | learner | vLLM |", "| --- | --- | --- | --- |"]
    for kind, found in sorted(models.items()):
        sampler = "the model itself, with its cache"
        if found["sampler"].startswith("compact decoder"):
            sampler = "compact decoder"
        elif "over the whole dialogue" in found["sampler"]:
            sampler = "the model itself, without a cache"
        vllm = describe_in_vllm(in_vllm.get(kind, {}))
        lines.append(f"| `{kind}` | {sampler} | {found['learner']} | {vllm} |")
    return "\n".join(lines)


def describe_in_vllm(found: Mapping[str, Any]) -> str:
    """How far vLLM is from the learner, or why it does not sample from a model."""
    if "drift" in found:
        apart = f"{found['drift']:.0e}"
        return apart if found["drift"] <= APART else f"no: it is {apart} nats from the learner"
    if "refused" not in found:
        return "not tried"
    why = found["refused"].replace("|", "\\|")
    return f"no: {why if len(why) <= LONGEST else f'{why[:LONGEST].rstrip()}…'}"


def read_in_vllm() -> dict[str, dict[str, Any]]:
    """The stored figures of vLLM, by model type."""
    stored: dict[str, dict[str, Any]] = json.loads(IN_VLLM.read_text())["models"]
    return stored


def read_table() -> str:
    """The table as it stands in the page."""
    return PAGE.read_text().removeprefix(HEAD).strip()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        subprocess.run([sys.executable, str(MEASURE), str(out)], check=True)
        table = build_table(json.loads(out.read_text())["models"], read_in_vllm())
    PAGE.write_text(f"{HEAD}\n{table}\n")


if __name__ == "__main__":
    main()
