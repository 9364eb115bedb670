"""How far the sampler's log-probabilities lie from the learner's, for two precisions.

    python precision.py cuda|cpu

A fresh model samples two turns; the learner's own forward over the packed trees must say the same
about every sampled token. Prints figures as they come.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from figures import print_figure

from rlx.batch import build_token_batch
from rlx.learner import Learner, join_ranks
from rlx.model import build_policy
from rlx.plugin import Problem
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.sampler import TransformersSampler
from rlx.spec import OptimizerSpec, RunnerSpec, TinyModelSpec, TurnSpec, TwoTurnRolloutSpec

MODEL = TinyModelSpec(
    hidden_size=512, heads=8, kv_heads=4, head_dim=64, layers=8, intermediate_size=1536
)
SCHEDULE = TwoTurnRolloutSpec(
    num_generations_answer=4,
    num_generations_confidence=3,
    answer=TurnSpec(max_new_tokens=64),
    confidence=TurnSpec(template="sure?\n", max_new_tokens=8),
)
SMALL = {"hidden_size": 64, "heads": 2, "kv_heads": 1, "layers": 2, "intermediate_size": 128}
"""The model's sizes on a CPU, where turns are shorter too."""
BOUND = {"float32": (1e-4, 1e-5), "bfloat16": (0.25, 0.02)}
"""Largest and mean |difference| in nats that pass."""


def differences(device: str, dtype: str) -> torch.Tensor:
    """|sampler - learner| for every sampled token, nats."""
    runner = RunnerSpec(device=device, dtype=dtype, zero_stage=2)
    ranks = join_ranks(runner)
    model = MODEL if device == "cuda" else MODEL.model_copy(update=SMALL)
    policy, twin = build_policy(model, 0), build_policy(model, 0)
    for parameter in twin.model.parameters():  # buffers stay: positions need float32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    sampler = TransformersSampler(twin, max_rows=256, device=ranks.device)
    learner = Learner(policy, runner, OptimizerSpec(), ranks)
    sampler.load(learner.weights())
    limit = SCHEDULE.answer.max_new_tokens if device == "cuda" else 12
    answer = SCHEDULE.answer.model_copy(update={"max_new_tokens": limit})
    schedule = SCHEDULE.model_copy(update={"answer": answer})
    problems = [Problem(id=str(n), prompt=f"nums: {n} 7\ntarget: 9\n", fields={}) for n in range(8)]
    with sampler.session() as session:
        trees = sample_rollout_trees(
            build_rollout_plan(schedule), problems, range(8), session, policy.dialogue
        )
    batch = build_token_batch(trees, temperatures={"answer": 1.0, "confidence": 1.0})
    own = learner.logprobs(batch, batch.is_own)
    return (own - batch.behaviour_logprobs).abs()[batch.is_own]


def main(device: str) -> None:
    """Measures both precisions; fails where one is out of bounds."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**alone, "MASTER_PORT": "0"})
    far = []
    for dtype, (most, mean) in BOUND.items():
        gap = differences(device, dtype)
        print_figure(dtype, max=float(gap.max()), mean=float(gap.mean()), tokens=len(gap))
        if not (float(gap.max()) <= most and float(gap.mean()) <= mean):
            far.append(dtype)
    assert not far, f"out of bounds: {far}"


if __name__ == "__main__":
    main(sys.argv[1])
