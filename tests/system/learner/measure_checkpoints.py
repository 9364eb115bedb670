"""Saves learners and critics on every rank that torchrun started, or goes on with saved ones.

    python -m torch.distributed.run --standalone --nproc-per-node N measure_checkpoints.py FOLDER DO

DO is `save`: a step is taken, all is saved, and another step is taken. Or it is `load`: what
another number of ranks has saved is converted, loaded under another ZeRO stage into another model
and critic, and takes the last step. `test_universal.py` judges how far that ends from where the
unbroken one did.
"""

import json
import sys
from pathlib import Path

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
        fill,
        train_batch,
        whole,
    )

    from rlx.learner import Critic, Learner, join_ranks
    from rlx.learner.universal import _convert_checkpoint_folder
    from rlx.model import build_policy
    from rlx.model.lora import adapt_model, adapter_weights
    from rlx.spec import CriticSpec, RunnerSpec

RATE = 1e-3
STEADY = USUAL.model_copy(update={"eps": 1e-5})
"""Adam moves by the sign of a gradient above ε: below it, rounding must not decide the sign."""
PARTS = ("policy", "critic")
ELSEWHERE = {
    "0-whole": 0,
    "1-whole": 3,
    "2-whole": 2,
    "3-whole": 1,
    "1-adapters": 3,
    "3-adapters": 2,
}
"""ZeRO stages that are saved, what learns there, and the stages that go on with it."""
FRESH = ("3-whole", "1-adapters")
"""Those that also go on with a phase that begins with empty moments."""


def ways(source):
    """By name, whether moments are emptied."""
    return {"carried": False, **({"fresh": True} if source in FRESH else {})}


class Pair:
    """A learner and a critic under one ZeRO stage; another seed makes others."""

    def __init__(self, ranks, stage, what, seed=0):
        runner = RunnerSpec(zero_stage=stage, device=DEVICE, micro_batch_tokens=84)
        policy = build_policy(MODEL, seed)
        self.critic = Critic(policy, runner, CriticSpec(value_clip=None), ranks, seed)
        if what == "adapters":
            adapt_model(policy.model, LORA, seed)
        if what == "adapters" and not seed:
            fill(adapter_weights(policy.model))
        self.learner = Learner(policy, runner, STEADY, ranks)
        self.engines = dict(zip(PARTS, (self.learner.engine, self.critic.engine), strict=True))

    def step(self, batches):
        return [
            [self.learner.update(train, LOSS, RATE).loss, self.critic.update(train, RATE).loss]
            for train in batches
        ]

    def go_on(self, batches, *, fresh):
        self.learner.begin_phase(STEADY, fresh=fresh)
        losses = self.step(batches)
        weights = copied(dict(self.learner.iterate_weights()))
        return {"losses": losses, "weights": weights, "critic": critic_weights(self.critic)}


def save(ranks, batches, folder):
    for source in ELSEWHERE:
        stage, what = source.split("-")
        here = folder / f"{ranks.count}-{source}"
        for name, fresh in ways(source).items():
            pair = Pair(ranks, int(stage), what)
            pair.step(batches[:1])
            if not fresh:
                for part, engine in pair.engines.items():
                    engine.save(here / part)
            ended = pair.go_on(batches[1:], fresh=fresh)
            if ranks.is_first:
                torch.save(ended, here / name)


def load(ranks, batches, folder):
    found = {}
    for source, stage in ELSEWHERE.items():
        here = folder / f"{3 - ranks.count}-{source}"
        universal = here / "universal"
        if stage and ranks.is_first:
            # `convert_checkpoints` does this in a new process, whose start costs ten times as much.
            for part in PARTS:
                _convert_checkpoint_folder(here / part, universal / part)
        ranks.barrier()
        for name, fresh in ways(source).items():
            pair = Pair(ranks, stage, source.split("-")[1], seed=5)
            for part, engine in pair.engines.items():
                engine.load((universal if stage else here) / part, universal=stage > 0)
            ended = pair.go_on(batches[1:], fresh=fresh)
            found.setdefault(source, {})[name] = apart(ended, torch.load(here / name))
    return found


def apart(found, expected):
    """How far from the unbroken ones losses and weights are."""
    ratios = torch.tensor(found["losses"]) / torch.tensor(expected["losses"]) - 1
    return {
        "losses": float(ratios.abs().max()),
        "weights": whole(found["weights"], expected["weights"]),
        "critic": whole(found["critic"], expected["critic"]),
    }


def main(folder, do):
    ranks = join_ranks(RunnerSpec(device=DEVICE))
    model = build_policy(MODEL, 0).model
    batches = [train_batch(seed, model) for seed in (0, 100)]
    if do == "save":
        save(ranks, batches, folder)
        return
    found = load(ranks, batches, folder)
    if ranks.is_first:
        (folder / f"on-{ranks.count}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
