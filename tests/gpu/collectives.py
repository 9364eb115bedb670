"""Counts the collective operations of one training step by ZeRO stage, on two CPU ranks.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/gpu/collectives.py

A small model in bfloat16 takes one step of one micro-batch per rank, and one of several. Rank 0
prints a figure per stage and number of micro-batches: by operation, how often it was called and the
elements and bytes that it was given. What rlx itself gathers, such as statistics, is among them. Of
the optimizer step, it has the bytes of all tensors at the peak; of a step's first and last
micro-batch, those before their forward pass.
"""

import gc
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from fake_memory import LiveBytes
from figures import print_figure
from shapes import LOSS, Shape, train_batch

from rlx.learner import Learner, Ranks, join_ranks
from rlx.learner.engine import AdamSpec, TrainingEngine
from rlx.learner.share import RankMicroBatches
from rlx.model import build_policy
from rlx.spec import OptimizerSpec, RunnerSpec, TinyModelSpec

MODEL = TinyModelSpec(
    hidden_size=256, heads=4, kv_heads=2, head_dim=64, layers=4, intermediate_size=768
)
SHAPE = Shape(8, 20, 12, 4, 4, answers=2, confidences=2)
STAGES = (1, 2, 3)
LIMITS = (4096, 80)
"""Tokens of a micro-batch: all in one, and in several."""
REPEATS = 3
"""Steps of which the lowest peak counts: a thread of gloo may keep a tensor a little longer."""


class Collectives(TorchDispatchMode):
    """Collective operations while it is active, and the sizes of the tensors given to them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "barrier" not in str(func):
            name = str(func).split(".")[1].strip("_")
            tensors = [one for one in tree_flatten(args)[0] if isinstance(one, torch.Tensor)]
            self.calls[name] += 1
            self.elements[name] += sum(one.numel() for one in tensors)
            self.bytes[name] += sum(one.nbytes for one in tensors)
        return func(*args, **(kwargs or {}))


class RealBytes(LiveBytes):
    """Without the tensors of shapes alone that DeepSpeed keeps."""

    def note(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super().note(storage)


def count_step(ranks: Ranks, stage: int, limit: int) -> dict[str, object]:
    """Of a later step: the first one makes buffers and moments."""
    live, peaks, befores = RealBytes(), [0], [0]
    finish, call = TrainingEngine._finish, TrainingEngine.__call__

    def finish_watched(engine: TrainingEngine) -> float:
        gc.collect()
        live.peak = live.live
        norm = finish(engine)
        peaks.append(live.peak)
        return norm

    def call_watched(engine: TrainingEngine, *arguments: object, **options: object) -> object:
        gc.collect()
        befores.append(live.live)
        return call(engine, *arguments, **options)

    runner = RunnerSpec(
        device="cpu", dtype="bfloat16", zero_stage=stage, ranks=2, micro_batch_tokens=limit
    )
    with (
        live,
        patch.object(TrainingEngine, "_finish", finish_watched),
        patch.object(TrainingEngine, "__call__", call_watched),
    ):
        policy = build_policy(MODEL, 0)
        count = sum(one.numel() for one in policy.model.parameters())
        learner = Learner(policy, runner, OptimizerSpec(), ranks, build_fused_adamw)
        train = train_batch(SHAPE, len(policy.tokenizer))
        for _ in range(REPEATS):
            learner.update(train, LOSS, 1e-4)
        befores.clear()
        with Collectives() as seen:
            learner.update(train, LOSS, 1e-4)
    merges = learner.chosen.form.merges
    share = RankMicroBatches(train.batch, train.wanted, limit, ranks, merge=merges)
    learner._engine.close()
    return {
        "micro_batches": len(share),
        "parameters": count,
        "calls": dict(seen.calls),
        "elements": dict(seen.elements),
        "bytes": dict(seen.bytes),
        "optimizer_step_bytes": min(peaks[-REPEATS:]),
        "before_first_forward": befores[0],
        "before_last_forward": befores[-1],
    }


def build_fused_adamw(parameters: Iterable[nn.Parameter], spec: AdamSpec) -> torch.optim.AdamW:
    """As on a GPU: without temporary copies of the moments."""
    return torch.optim.AdamW(list(parameters), lr=spec.learning_rate, fused=True)


def main() -> None:
    """One figure per stage and size of micro-batches."""
    ranks = join_ranks(RunnerSpec(device="cpu", ranks=2))
    for stage in STAGES:
        for limit in LIMITS:
            found = count_step(ranks, stage, limit)
            if ranks.is_first:
                print_figure(f"stage {stage}, {found['micro_batches']} micro-batches", **found)


if __name__ == "__main__":
    main()
