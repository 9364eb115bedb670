"""Warm-starts a small model on every rank that torchrun started, together and alone.

    python -m torch.distributed.run --standalone --nproc-per-node N measure_warm_start.py FOLDER

`test_shared_warm_start.py` judges.
"""

import gc
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

from rlx.importing import speed_up_imports

with speed_up_imports():
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from rlx import learner
    from rlx.learner import join_ranks
    from rlx.learner.engine import TrainingEngine
    from rlx.model import build_policy, warm_start_policy
    from rlx.phase_setup import build_setup
    from rlx.plan import read_spec
    from rlx.progress import ProgressFile
    from rlx.run import warm_start

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"
STEPS = 4
SETTINGS = (
    *("model.hidden_size=64", "model.heads=2", "model.kv_heads=1", "model.layers=2"),
    *("model.intermediate_size=64", f"model.warm_start.steps={STEPS}"),
    *("model.warm_start.batch_size=5", "model.warm_start.warmup_steps=1"),
    *("runner.device=cpu", "runner.zero_stage=3"),
)
LIMITS = {"one micro-batch": 16_384, "several": 96}


class Losses:
    """Stands for the recorder; keeps the curve, what is told, and in which order."""

    def __init__(self):
        self.curve, self.events = {}, []

    def warm_start(self, losses, total):
        self.curve |= losses

    def event(self, kind, message, **_):
        self.events.append((kind, message))

    def phase(self, name): ...


def copied(policy):
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def measure_distance(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def read(limit):
    return read_spec(RLCR, [*SETTINGS, f"runner.micro_batch_tokens={limit}"]).spec


def start(spec, ranks):
    """A policy before and after its warm start, and what the recorder was told."""
    policy, recorder = build_policy(spec.model, spec.seed), Losses()
    before = copied(policy)
    told = recorder if ranks.is_first else None
    warm_start.start_warm(spec, build_setup(spec), policy, ranks, ProgressFile(None), told)
    return before, copied(policy), recorder


def train_alone(spec, folder):
    """Weights and losses of a warm start by one process."""
    policy, losses = build_policy(spec.model, spec.seed), []
    task = build_setup(spec).demonstrations
    warm_start_policy(policy, spec, task, folder, lambda step, steps, loss: losses.append(loss))
    return copied(policy), losses


def watch_engines():
    """Watches what an engine holds of its weights and of their moments, when it is
    closed."""
    sizes, storages, close = [], [], TrainingEngine.close

    def note(self):
        sizes.extend((p.ds_tensor.numel(), p.ds_numel) for p in self._module.parameters())
        moments = self._base_optimizer.state.values()
        held = [p.ds_tensor for p in self._module.parameters()]
        held += [value for state in moments for value in state.values() if value.ndim]
        storages.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in held)
        close(self)

    return sizes, storages, patch.object(TrainingEngine, "close", note)


def compare(spec, ranks, folder, alone):
    """A warm start by all ranks, beside that of one process."""
    sizes, storages, watched = watch_engines()
    with watched:
        before, trained, recorder = start(spec, ranks)
    gc.collect()
    with patch.object(learner, "train_on_demonstrations", None):  # it is not called again
        _, again, reused = start(spec, ranks)
    everywhere = ranks.gather({name: weight.numpy() for name, weight in trained.items()})
    weights, losses = alone
    return {
        "losses": [recorder.curve.get(step) for step in range(1, STEPS + 1)],
        "expected": losses,
        "apart": measure_distance(trained, weights),
        "learned": measure_distance(trained, before),
        "alike on every rank": all(
            (one[name] == everywhere[0][name]).all() for one in everywhere for name in one
        ),
        "reused": measure_distance(trained, again) == 0 and reused.curve == recorder.curve,
        "held": sum(held for held, _ in sizes) / sum(whole for _, whole in sizes),
        "storages": len(storages),
        "left": sum(not storage.expired() for storage in storages),
        "events": recorder.events,
    }


def main(folder):
    os.environ["RLX_HOME"] = str(folder)
    spec = read(16_384)
    ranks = join_ranks(spec.runner)
    alone = train_alone(spec, folder / f"alone{ranks.rank}")
    found = {}

    def fits(policy, device, parts=1):
        return parts > 1

    with patch.object(warm_start, "fits_warm_start", fits):
        for name, limit in LIMITS.items():
            found[name] = compare(read(limit), ranks, folder, alone)
    usual = start(spec, ranks)
    found["alone"] = measure_distance(usual[1], alone[0])
    if ranks.is_first:
        found["cache"] = sorted(path.name for path in (folder / "cache" / "warm_start").iterdir())
        found["of one process"] = [path.name for path in (folder / "alone0").iterdir()]
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
