"""Loads a model on every rank that torchrun started, and compares it with plain loading.

    python -m torch.distributed.run --standalone --nproc-per-node N measure_loading.py FOLDER

Plain loading is in float32 and as a whole; DeepSpeed rounds and shards what it is given. Here
weights come in the precision of training, and under ZeRO stage 3 one by one. `test_loading.py`
judges.
"""

import dataclasses
import gc
import json
import re
import shutil
import sys
import time
from collections import deque
from contextlib import contextmanager
from itertools import starmap
from pathlib import Path
from unittest.mock import patch

from rlx.importing import speed_up_imports

with speed_up_imports():
    import deepspeed
    import torch
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as ZeRO3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
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
    from safetensors.torch import load_file
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.profiler import ProfilerActivity, profile

    from rlx.learner import Critic, Learner, build_learner_with_reference, engine, join_ranks
    from rlx.learner import learner as learner_module
    from rlx.model import adapt_policy, build_policy, convert_weights, copy_model
    from rlx.sampler import TransformersSampler, VllmSampler, copy_policy, vllm_engine
    from rlx.spec import CriticSpec, PretrainedModelSpec, RunnerSpec, TinyModelSpec, VllmSamplerSpec

RATE = 1e-3
LARGE = TinyModelSpec(
    hidden_size=256, heads=4, kv_heads=2, head_dim=64, layers=4, intermediate_size=768
)
"""Its weights are large beside all else that is counted."""
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
    with patch.object(engine, "_place_weights", lambda module, _, device, __: module.to(device)):
        yield


def load(folder, dtype, what):
    spec = PretrainedModelSpec(path=str(folder), lora=LORA if what == "adapters" else None)
    return adapt_policy(build_policy(spec, 0, dtype=dtype), spec, 0)


def take_step(policy, runner, ranks, train):
    """Weights before and after a step, and its figures."""
    learner = Learner(policy, runner, USUAL, ranks)
    before = copied(learner.weights())
    figures = dataclasses.asdict(learner.update(train, LOSS, RATE))
    return before, figures, copied(learner.weights()), copied(learner.adapter())


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
        learned = same(copied(learner.weights()), copied(dict(read_parameters(folder))))
        learner.update(train, LOSS, RATE)
        logprobs = reference.logprobs(train.batch, train.mask)
        ends.append((learned, logprobs, copied(learner.weights()), critic_weights(critic)))
    (untouched, *plain), (still, *found) = ends
    return {
        "the critic leaves the policy alone": untouched and still,
        "reference": torch.equal(found[0], plain[0]),
        "policy": same(found[1], plain[1]),
        "critic": same(found[2], plain[2]),
    }


def compare_references(dtype, ranks, train, folder):
    """How far a sharded reference is from a whole one, after the policy has learned; and what of
    it a rank holds."""
    found = []
    for stage in (1, 3):
        runner = RunnerSpec(zero_stage=stage, dtype=dtype, device=DEVICE, micro_batch_tokens=84)
        policy = load(folder / dtype, getattr(torch, dtype), "whole")
        learner, reference = build_learner_with_reference(policy, runner, USUAL, ranks)
        before = reference.logprobs(train.batch, train.mask)
        learner.update(train, LOSS, RATE)
        found.append((before, reference.logprobs(train.batch, train.mask)))
    (whole, _), (sharded, later) = found
    held = [getattr(p, "ds_tensor", p).numel() for p in reference._module.parameters()]
    every = sum(p.numel() for p in load(folder / dtype, torch.float32, "whole").model.parameters())
    return {
        "apart": float((sharded - whole).abs().max()),
        "unchanged": torch.equal(later, sharded),
        "learned": not torch.equal(learner.logprobs(train.batch, train.mask), sharded),
        "part": sum(held) / every,
    }


@contextmanager
def no_change():
    yield


def read_parameters(folder):
    return load(folder / "bfloat16", torch.bfloat16, "whole").model.named_parameters()


def count_whole_weights(ranks, folder):
    """How many weights are whole at most while a model is sharded, and while it is sent to a
    sampler."""
    runner = RunnerSpec(zero_stage=3, dtype="bfloat16", device=DEVICE)
    policy = load(folder / "bfloat16", torch.bfloat16, "whole")
    copy = copy_policy(policy, torch.bfloat16, ranks.device)
    shard, begun, most = deepspeed.zero.Init._zero_init_param, [], []

    def count(self, parameter):
        begun.append(parameter)
        most.append(sum(p.numel() > 0 for p in begun))
        shard(self, parameter)

    with patch.object(deepspeed.zero.Init, "_zero_init_param", count):
        learner = Learner(policy, runner, USUAL, ranks)
    sampler = TransformersSampler(copy, max_rows=4, device=ranks.device)
    weights = copied(learner.weights())
    with torch.no_grad():
        for parameter in copy.model.parameters():
            parameter.zero_()
    held = []

    def look(name, weight):
        held.append(sum(p.numel() > 0 for p in policy.model.parameters()))
        return name, weight

    sampler.load_each(starmap(look, learner.iterate_weights()))
    return {
        "parameters": len(begun),
        "while it is sharded": max(most),
        "while it is sent": max(held),
        "sent": same(weights, dict(copy.model.named_parameters())),
    }


class WorkerWithoutVllm:
    """Keeps what it is sent."""

    def __init__(self, environment, folders):
        self.folders = folders

    def ask(self, message, doing, weights=None):
        if message.get("ask") == "load":
            self.sent = load_file(f"/dev/fd/{weights._file.fileno()}")
        return {"longest": 128}

    def close(self):
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def count_gathered():
    """Bytes of all weights that are gathered and not yet let go, whenever one was gathered."""
    gathered, held = [], []
    gather = engine.TrainingEngine.gather_parameter

    def count(self, parameter):
        whole = gather(self, parameter)
        gathered.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
        held.append(sum(size for storage, size in gathered if not storage.expired()))
        return whole

    with patch.object(engine.TrainingEngine, "gather_parameter", count):
        yield held


def count_sent_bytes(what, ranks, folder):
    """Bytes that are gathered at most while weights are sent to vLLM beside the ranks, and whether
    all of them arrive."""
    runner = RunnerSpec(zero_stage=3, dtype="bfloat16", device=DEVICE)
    policy = load(folder / "bfloat16", torch.bfloat16, what)
    plain = load(folder / "bfloat16", torch.bfloat16, "whole")
    sizes = [p.nbytes for p in plain.model.parameters()]
    spec = VllmSamplerSpec()
    with (
        patch.object(vllm_engine, "require_vllm", lambda: None),
        patch.object(vllm_engine, "WorkerProcess", WorkerWithoutVllm),
    ):
        sampler = VllmSampler(plain, spec, runner, ranks.device)
        learner = Learner(policy, runner, USUAL, ranks)
        expected = copied(dict(learner.iterate_weights()))
        with count_gathered() as held:
            sampler.load_each(learner.iterate_weights())
        sent = same(expected, sampler._worker.sent)
        sampler.close()
    return {"gathered": max(held), "largest": max(sizes), "whole": sum(sizes), "sent": sent}


def save_models(folder):
    for dtype in STORED:
        build_policy(MODEL, 0, dtype=getattr(torch, dtype)).save(folder / dtype)
    build_policy(LARGE, 0, dtype=torch.bfloat16).save(folder / "large")


def read_private_bytes():
    """Memory of this process that is no file's; Linux counts it."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10


def sum_allocations(events, ends, mapped):
    """The most bytes of tensors at a time, in each of the moments that end then.

    What PyTorch's allocator was asked for, to the byte, without the heap of the process and without
    files of these sizes: they are mapped, and threads let them go at some time. Freeing what was
    there before is not among the events.
    """
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    asked = deque((at, size) for at, size in sizes if abs(size) not in mapped)
    held, peaks = 0, {"mapped": sum(size for _, size in sizes if size in mapped)}
    for moment, end in ends.items():
        peaks[moment] = held
        while asked and asked[0][0] <= end:
            held += asked.popleft()[1]
            peaks[moment] = max(peaks[moment], held)
    return peaks


def measure_memory(stage, ranks, folder):
    """Bytes of tensors at the peak of each moment of loading, where the device is the host, and
    private bytes of the process once the files are open.

    The whole copy that a device gets under stages 1 and 2 is made beforehand.
    """
    runner = RunnerSpec(zero_stage=stage, dtype="bfloat16", device=DEVICE)
    gc.collect()
    ends = {}

    def end(moment):
        ends.setdefault(moment, time.time_ns())

    def note(owner, name, moment, *, before=False):
        function = getattr(owner, name)

        def call(*arguments, **options):
            if before:
                end(moment)
            result = function(*arguments, **options)
            end(moment)
            return result

        return patch.object(owner, name, call)

    before = read_private_bytes()
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events,
        note(learner_module, "choose_form", "trial of forms"),
        note(engine, "_place_weights", "weights, one by one"),
        note(BF16_Optimizer, "_flatten_dense_tensors_aligned", "weights in a row"),
        note(DeepSpeedZeroOptimizer, "flatten_dense_tensors_aligned", "weights in a row"),
        # It gathers weights and gives them back, by threads of its own.
        note(ZeRO3, "create_reduce_and_remove_grad_hooks", "optimizer", before=True),
    ):
        policy = load(folder / "large", torch.bfloat16, "whole")
        private = read_private_bytes() - before
        end("files")
        if stage < 3:
            policy = dataclasses.replace(policy, model=copy_model(policy.model))
        Learner(policy, runner, USUAL, ranks)
        end("optimizer")
    mapped = {file.stat().st_size for file in (folder / "large").glob("*.safetensors")}
    sums = sum_allocations(events.profiler.kineto_results.events(), ends, mapped)
    return {"private": private, **sums}


def main(folder):
    ranks = join_ranks(RunnerSpec(device=DEVICE))
    if ranks.is_first:
        save_models(folder)
    ranks.barrier()
    train = train_batch(0, build_policy(MODEL, 0).model)
    found = {
        "cases": {repr(case): compare(case, ranks, train, folder) for case in CASES},
        "critics": {s: compare_critic(s, ranks, train, folder) for s in range(4)},
        "references": {dtype: compare_references(dtype, ranks, train, folder) for dtype in STORED},
        "whole": count_whole_weights(ranks, folder),
        "sent": {what: count_sent_bytes(what, ranks, folder) for what in ("whole", "adapters")},
        "memory": {s: measure_memory(s, ranks, folder) for s in (1, 2, 3)},
    }
    if ranks.is_first:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
