"""Whole training steps as a run takes them: sampled, credited, learned, weights handed over.

    python own_steps.py CASE          CASE is a file of JSON; see real_steps.py beside this file

takes GRPO steps in a process of its own, one for each line that arrives. It prints a line when it
is ready, and after every step one with its seconds, {"cpu": …, "wall": …}.
"""

import json
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from harness import spent
from models import alone, policy
from torch import Tensor

from rlx.batch import TokenBatch, build_token_batch
from rlx.credit import Credit, CreditInputs, estimate_grpo
from rlx.learner import Learner
from rlx.phase_setup import CreditRules
from rlx.plugin import Problem
from rlx.rollout import RolloutTree, build_rollout_plan, sample_rollout_trees
from rlx.sampler import TransformersSampler, copy_policy
from rlx.spec import (
    CreditSpec,
    Grpo,
    LossSpec,
    OptimizerSpec,
    RunnerSpec,
    SingleRolloutSpec,
    TurnSpec,
    TwoTurnRolloutSpec,
)
from rlx.step import ScoredRows, TokenStreams, assign_credit

LOSS = LossSpec()
RATE = 1e-6


def reward(text: str) -> float:
    """A number in [0, 1) that hardly two texts share, so that every group carries a signal."""
    return zlib.crc32(text.encode()) / 2**32


class OwnSteps:
    """The sampler, the learner and what lies between them.

    Args:
        rollout: the schedule.
        estimator: with its defaults.
        micro_batch_tokens: of the learner.
    """

    def __init__(
        self,
        rollout: SingleRolloutSpec | TwoTurnRolloutSpec,
        estimator: Callable[[CreditInputs], Tensor | Credit],
        micro_batch_tokens: int,
    ) -> None:
        runner = RunnerSpec(device="cpu", zero_stage=0, micro_batch_tokens=micro_batch_tokens)
        self._rollout, self._estimator = rollout, estimator
        self._policy = copy_policy(policy(), torch.float32)
        self._learner = Learner(policy(), runner, OptimizerSpec(), alone())
        device = torch.device("cpu")
        self._sampler = TransformersSampler(self._policy, max_rows=512, device=device)

    def step(self, texts: Sequence[str], seed: int) -> None:
        """One step from these prompts."""
        self.learn(self.sample(texts, seed))

    def sample(self, texts: Sequence[str], seed: int) -> list[RolloutTree]:
        """Rollouts of these prompts."""
        problems = [Problem(id=str(n), prompt=text, fields={}) for n, text in enumerate(texts)]
        seeds = [seed * len(texts) + n for n in range(len(texts))]
        with self._sampler.session() as session:
            return sample_rollout_trees(
                build_rollout_plan(self._rollout), problems, seeds, session, self._policy.dialogue
            )

    def learn(self, trees: Sequence[RolloutTree]) -> None:
        """Credit, update, and the handing over of weights."""
        batch = build_token_batch(trees)
        train = assign_credit(
            ScoredRows.join(batch, batch.is_own, **_rewards(batch, trees)),
            TokenStreams(old_logprobs=batch.behaviour_logprobs),
            CreditRules(
                estimator=self._estimator,
                credit=CreditSpec(),
                loss=LOSS,
                max_tokens=self._rollout.budgets,
            ),
        )
        assert self._learner.update(train, LOSS, RATE) is not None
        self._sampler.load(dict(self._learner.iterate_weights()))


def _rewards(batch: TokenBatch, trees: Sequence[RolloutTree]) -> dict[str, torch.Tensor]:
    turns = torch.zeros(batch.state_ids.shape)
    for b, row in enumerate(batch.rows):
        segment = trees[row.tree].segments[row.segment]
        turns[b, segment.turn - 1] = reward(segment.text)
    return {
        "turn_rewards": turns,
        "turn_present": turns != 0,
        "global_rewards": torch.zeros(len(turns)),
    }


def main(case: dict) -> None:
    """GRPO steps of `case`, for as long as lines arrive."""
    rollout = SingleRolloutSpec(
        num_generations_answer=case["answers"], answer=TurnSpec(max_new_tokens=case["answer"])
    )
    steps = OwnSteps(rollout, partial(estimate_grpo, options=Grpo()), case["tokens"])
    print(json.dumps({"ready": True}), flush=True)
    for number, _ in enumerate(sys.stdin):
        first = number * case["prompts"] % len(case["texts"])
        texts = case["texts"][first : first + case["prompts"]]
        took = spent(lambda texts=texts, number=number: steps.step(texts, number))
        print(json.dumps(asdict(took)), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
