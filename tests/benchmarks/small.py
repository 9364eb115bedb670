"""What users meet first: how long `rlx validate` takes, and how fast answers are scored."""

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import Spent, beside, compared, in_turns, row, spent
from literal import literal_score

from rlx_plugins.countdown import CountdownTask, compute_score

__all__ = ["countdown_score", "validate_cpu_seconds"]

ROOT = Path(__file__).parents[2]
ROUNDS = 5


def validate_cpu_seconds() -> list[dict]:
    """CPU seconds of a whole `rlx validate experiments/rlcr.yaml`, start of Python included."""
    command = [Path(sys.executable).with_name("rlx"), "validate", "experiments/rlcr.yaml"]
    imports = [sys.executable, "-c", "import pydantic; pydantic.BaseModel"]
    took = in_turns({"rlx": lambda: _run(command), "pydantic": lambda: _run(imports)}, ROUNDS)
    wall = statistics.median(t.wall for t in took["rlx"])
    baseline = beside("none; to import Pydantic", [t.cpu for t in took["pydantic"]])
    values = [t.cpu for t in took["rlx"]]
    return [row("validate_cpu_seconds", values, baseline, "CPU s", wall=wall)]


def _run(command: Sequence[Path | str]) -> Spent:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


def countdown_score() -> list[dict]:
    """Well-formed answers scored, beside a scorer of a regex and `eval`."""
    task = CountdownTask(numbers={3: 0.5, 4: 0.5}, operators="+-*/")
    cases = []
    for i in range(1500):
        problem = task.problem("train", i, 0)
        truth = {"target": problem.fields["target"], "numbers": problem.fields["numbers"]}
        cases.append((task.demonstration(problem, i).turns[0], truth))
    assert [compute_score(*c) for c in cases] == [literal_score(*c) for c in cases]
    took = in_turns(
        {
            "literal": lambda: spent(lambda: [literal_score(*c) for c in cases]),
            "ours": lambda: spent(lambda: [compute_score(*c) for c in cases]),
        },
        ROUNDS,
    )
    baseline = "regex and eval, written plainly"
    return [compared("countdown_score", took["literal"], took["ours"], baseline)]
