"""What makes the host wait for a GPU, by source line: per decoding step and per micro-batch.

    python tests/gpu/waits.py

Counts on a mirrored GPU (`tests/mirrored_gpu.py`) the waits of a longer (copies from pageable
memory are some) and of a shorter piece of
work, and divides their difference. Prints the table of docs/gpu.md, which names functions, since
lines move.
"""

import ast
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from babblers import use_flash
from mirrored_gpu import CUDA, SOURCES, MirroredGpu, mirror_gpu
from shapes import Shape, train_batch

from rlx.learner import Learner, Ranks, choice, engine
from rlx.learner.forms import CachedForm, ForwardForm, GroupedForm, PlainForm
from rlx.learner.share import RankMicroBatches
from rlx.model import build_policy
from rlx.plugin import Problem
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.sampler import TransformersSampler, copy_policy
from rlx.spec import (
    LossSpec,
    OptimizerSpec,
    RunnerSpec,
    SingleRolloutSpec,
    TinyModelSpec,
    TurnSpec,
)

MODEL = TinyModelSpec(
    hidden_size=32, heads=1, kv_heads=1, head_dim=32, layers=1, intermediate_size=32
)
STEPS = (12, 44)
"""Decoding steps of the two pieces: both beyond the warm-up, within one captured shape."""
TREES = (2, 4)
"""Trees of the two updates, whose rows have micro-batches of their own."""
FORMS: tuple[ForwardForm, ...] = (GroupedForm(), CachedForm(), PlainForm())

Waits = dict[tuple[str, str], Fraction]
"""How often, by function and by what waits."""


def name_function(line: str) -> str:
    """`FILE: FUNCTION` of `FILE:LINE`."""
    name, _, number = line.rpartition(":")
    tree = ast.parse((Path(SOURCES) / name).read_text())
    found = [
        (node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.lineno <= int(number) <= (node.end_lineno or 0)
    ]
    return f"{name.removeprefix('rlx/')}: {max(found)[1]}"


def count_each(pieces: tuple[Counter[str], Counter[str]], more: int) -> Waits:
    """Waits of each of the `more` units that the second piece has beyond the first."""
    short, long = pieces
    waits: Counter[tuple[str, str]] = Counter()
    for line in long:
        if difference := long[line] - short[line]:
            where, _, what = line.partition(" ")
            waits[name_function(where), what] += difference
    return {key: Fraction(count, more) for key, count in waits.items()}


def count_decoding(gpu: MirroredGpu, *, flash: bool = False) -> Waits:
    """Waits per decoding step of rows that do not end."""
    pieces = []
    with use_flash(wanted=flash):
        policy = replace(build_policy(MODEL, 0), end_ids=())
        sampler = TransformersSampler(copy_policy(policy, torch.float32), max_rows=8, device=CUDA)
        assert "captured steps" in sampler.description, sampler.description
        for steps in STEPS:
            turn = TurnSpec(max_new_tokens=steps)
            plan = build_rollout_plan(SingleRolloutSpec(num_generations_answer=2, answer=turn))
            gpu.reset()
            with sampler.session() as session:
                problem = Problem(id="a", prompt="nums: 1 2\n", fields={})
                sample_rollout_trees(plan, [problem], [0], session, policy.dialogue)
            pieces.append(gpu.waits + gpu.copies)
    return count_each((pieces[0], pieces[1]), STEPS[1] - STEPS[0])


def count_updating(gpu: MirroredGpu, form: ForwardForm) -> Waits:
    """Waits per micro-batch of an update; those of DeepSpeed's own code are not counted."""
    from mirrored_deepspeed import train_on_mirror

    policy, pieces, sizes = build_policy(MODEL, 0), [], []
    ranks = Ranks(0, 1, CUDA)
    runner = RunnerSpec(device="cuda", dtype="bfloat16", zero_stage=2, micro_batch_tokens=1)
    forms = (form, PlainForm())
    with train_on_mirror(), patch.dict(choice.FORMS, {"cuda": forms}):
        learner = Learner(policy, runner, OptimizerSpec(), ranks)
        assert learner.chosen.form is form, learner.chosen
        for trees in TREES:
            train = train_batch(Shape(trees, 20, 8, 4, 3, answers=2, confidences=1), 100)
            share = RankMicroBatches(train.batch, train.wanted, 1, ranks, merge=form.merges)
            sizes.append(len(share))
            gpu.reset()
            learner.update(train, LossSpec(), 1e-3)
            pieces.append(gpu.waits + gpu.copies)
    name = Path(engine.__file__).relative_to(SOURCES)
    for counts in pieces:
        for line in [line for line in counts if line.startswith(str(name))]:
            del counts[line]
    return count_each((pieces[0], pieces[1]), sizes[1] - sizes[0])


def print_rows(rows: list[tuple[str, ...]]) -> None:
    """Prints rows of a table in Markdown."""
    for row in rows:
        print(f"| {' | '.join(row)} |")


def list_rows() -> list[tuple[str, ...]]:
    """Rows of the table: what is computed, where it waits, for what, and how often per unit."""
    rows: list[tuple[str, ...]] = []
    with mirror_gpu() as gpu:
        works = {
            f"decoding step{how}": count_decoding(gpu, flash=bool(how))
            for how in ("", ", flash attention")
        }
        for form in FORMS:
            works[f"micro-batch, {form.name}"] = count_updating(gpu, form)
    for work, waits in works.items():
        for (where, what), count in sorted(waits.items()):
            rows.append((work, f"`{where}`", f"`{what}`", str(count)))
    return rows


HEADING = ("per", "where", "waits for", "times")


def main() -> None:
    """Prints the table in Markdown."""
    print_rows([HEADING, ("---",) * len(HEADING), *list_rows()])


if __name__ == "__main__":
    main()
