"""Loads a model on every rank that torchrun started, and compares it with plain loading.

    python -m torch.distributed.run --standalone --nproc-per-node N measure_loading.py FOLDER

Plain loading is in float32 and as a whole; DeepSpeed rounds and shards what it is given. Here
weights come in the precision of training, and under ZeRO stage 3 one by one. `test_loading.py`
judges.
"""

import dataclasses
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from rlx.importing import speed_up_imports

with speed_up_imports():
    import torch
    from measure_learner import (
        DEVICE,
        LORA,
        LOSS,
        MODEL,
        USUAL,
        copied,
        critic_weights,
        train_batch,
    )

    from rlx.learner import Critic, Learner, build_learner_with_reference, join_ranks
    from rlx.learner import learner as learner_module
    from rlx.model import adapt_policy, build_policy, convert_weights
    from rlx.spec import CriticSpec, PretrainedModelSpec, RunnerSpec

RATE = 1e-3
STORED = ("float32", "bfloat16")
CASES = [
    *((stage, "bfloat16", STORED[stage % 2], "whole") for stage in range(3)),
    *((3, "bfloat16", stored, "whole") for stored in STORED),
    *((stage, "bfloat16", "bfloat16", "adapters") for stage in (1, 3)),
    *((3, "float32", "float32", what) for what in ("whole", "adapters")),
]
"""ZeRO stage, precision of training, precision of the files, what learns. Stage 3 loads in its own
way, and the others alike."""


@contextmanager
def plain_loading():
    """The engine gets a whole float32 model on its device, and DeepSpeed does the rest."""
    with patch.object(learner_module, "_place_weights", lambda one, _, device, __: one.to(device)):
        yield


def load(folder, dtype, what):
    spec = PretrainedModelSpec(path=str(folder), lora=LORA if what == "adapters" else None)
    return adapt_policy(build_policy(spec, 0, dtype=dtype), spec, 0)


def take_step(policy, runner, ranks, train):
    """Weights before and after a step, and its figures."""
    learner = Learner(policy, runner, USUAL, ranks)
    before = copied(dict(learner.iterate_weights()))
    figures = dataclasses.asdict(learner.update(train, LOSS, RATE))
    return before, figures, copied(dict(learner.iterate_weights())), copied(learner.adapter())


def compare(case, ranks, train, folder):
    """Whether loading one by one changes nothing."""
    stage, dtype, stored, what = case
    source = folder / stored
    runner = RunnerSpec(zero_stage=stage, dtype=dtype, device=DEVICE, micro_batch_tokens=84)
    with plain_loading():
        policy = load(source, torch.float32, what)
        expected = take_step(policy, runner, ranks, train)
    found = take_step(load(source, getattr(torch, dtype), what), runner, ranks, train)
    read = load(source, torch.float32, "whole").model
    convert_weights(read, getattr(torch, dtype))
    return {
        "before": same(found[0], expected[0]),
        "read": same(found[0], dict(read.named_parameters())),
        "figures": found[1] == expected[1],
        "after": same(found[2], expected[2]) and same(found[3], expected[3]),
        "learned": not same(found[0], found[2]),
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def compare_critic(stage, ranks, train, folder):
    """A critic and a reference beside the learner, from one set of weights."""
    runner = RunnerSpec(zero_stage=stage, dtype="bfloat16", device=DEVICE, micro_batch_tokens=84)
    ends = []
    for dtype, around in ((torch.float32, plain_loading), (torch.bfloat16, no_change)):
        with around():
            policy = load(folder / "bfloat16", dtype, "whole")
            critic = Critic(policy, runner, CriticSpec(value_clip=None), ranks, 0)
            learner, reference = build_learner_with_reference(policy, runner, USUAL, ranks)
        critic.update(train, RATE)
        learned = same(
            copied(dict(learner.iterate_weights())), copied(dict(read_parameters(folder)))
        )
        learner.update(train, LOSS, RATE)
        logprobs = reference.logprobs(train.batch, train.mask)
        ends.append(
            (learned, logprobs, copied(dict(learner.iterate_weights())), critic_weights(critic))
        )
    (untouched, *plain), (still, *found) = ends
    return {
        "the critic leaves the policy alone": untouched and still,
        "reference": torch.equal(found[0], plain[0]),
        "policy": same(found[1], plain[1]),
        "critic": same(found[2], plain[2]),
    }


@contextmanager
def no_change():
    yield


def read_parameters(folder):
    return load(folder / "bfloat16", torch.bfloat16, "whole").model.named_parameters()


def save_models(folder):
    for dtype in STORED:
        build_policy(MODEL, 0, dtype=getattr(torch, dtype)).save(folder / dtype)


def main(folder):
    ranks = join_ranks(RunnerSpec(device=DEVICE))
    if ranks.is_first:
        save_models(folder)
    ranks.barrier()
    train = train_batch(0, build_policy(MODEL, 0).model)
    found = {
        "cases": {repr(case): compare(case, ranks, train, folder) for case in CASES},
        "critics": {s: compare_critic(s, ranks, train, folder) for s in range(4)},
    }
    if ranks.is_first:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
