"""Training steps of a real model on prompts that begin alike; see bench.py beside this file.

    python steps.py ours|plain MODEL      MODEL holds a model and case.json

`ours` are steps as a run takes them: sampled, credited, learned, weights handed over. `plain` is
the strongest plain form of transformers: one cache in sampling and one with gradient in the update.
No token of either ends a turn: all lengths are the limit.
"""

import json
import math
import os
import socket
import sys
import time
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from rlx.batch import build_token_batch
from rlx.credit import estimate_grpo, estimate_two_level, group_advantages
from rlx.learner import Learner, join_ranks
from rlx.model import PlainDialogue, Policy
from rlx.phase_setup import CreditRules
from rlx.plugin import Problem
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.sampler import TransformersSampler, copy_policy
from rlx.spec import (
    CreditSpec,
    Grpo,
    LossSpec,
    OptimizerSpec,
    RunnerSpec,
    SingleRolloutSpec,
    TurnSpec,
    TwoLevel,
    TwoTurnRolloutSpec,
)
from rlx.step import ScoredRows, TokenStreams, assign_credit

LOSS = LossSpec()
RATE = 1e-6
SHARE = 6
"""Prompts of one backward pass of the plain form, at most."""
QUESTION = (
    "<|im_end|>\n<|im_start|>user\nHow sure are you, from 0 to 1?<|im_end|>\n"
    "<|im_start|>assistant\n<confidence>"
)


def reward(text: str) -> float:
    """A number in [0, 1) that hardly two texts share, so that every group carries a signal."""
    return zlib.crc32(text.encode()) / 2**32


def load_policy(folder: Path) -> Policy:
    """The model, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Policy(model.eval(), tokenizer, PlainDialogue(tokenizer, ()), end_ids=())


class OwnSteps:
    """The sampler, the learner and what lies between them."""

    def __init__(self, folder: Path, case: dict) -> None:
        answers, answer = case["answers"], TurnSpec(max_new_tokens=case["answer"])
        rollout = SingleRolloutSpec(num_generations_answer=answers, answer=answer)
        estimator = partial(estimate_grpo, options=Grpo())
        if case["confidences"]:
            rollout = TwoTurnRolloutSpec(
                num_generations_answer=answers,
                answer=answer,
                num_generations_confidence=case["confidences"],
                confidence=TurnSpec(template=QUESTION, max_new_tokens=case["confidence"]),
            )
            estimator = partial(estimate_two_level, options=TwoLevel())
        self._plan = build_rollout_plan(rollout)
        self._rules = CreditRules(
            estimator=estimator, credit=CreditSpec(), loss=LOSS, max_tokens=rollout.budgets
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        runner = RunnerSpec(device="cpu", zero_stage=0, micro_batch_tokens=16_384)
        self._policy = copy_policy(load_policy(folder), torch.float32)
        self._learner = Learner(load_policy(folder), runner, OptimizerSpec(), join_ranks(runner))
        device = torch.device("cpu")
        self._sampler = TransformersSampler(self._policy, max_rows=512, device=device)

    def step(self, texts: Sequence[str], number: int) -> None:
        """One step from these prompts."""
        problems = [Problem(id=str(n), prompt=text, fields={}) for n, text in enumerate(texts)]
        seeds = [number * len(texts) + n for n in range(len(texts))]
        with self._sampler.session() as session:
            trees = sample_rollout_trees(
                self._plan, problems, seeds, session, self._policy.dialogue
            )
        batch = build_token_batch(trees)
        turns = torch.zeros(batch.state_ids.shape)
        for b, row in enumerate(batch.rows):
            segment = trees[row.tree].segments[row.segment]
            turns[b, segment.turn - 1] = reward(segment.text)
        rows = ScoredRows.join(
            batch,
            batch.is_own,
            turn_rewards=turns,
            turn_present=turns != 0,
            global_rewards=torch.zeros(len(turns)),
        )
        streams = TokenStreams(old_logprobs=batch.behaviour_logprobs)
        assert self._learner.update(assign_credit(rows, streams, self._rules), LOSS, RATE)
        self._sampler.load(dict(self._learner.iterate_weights()))


class PlainSteps:
    """Steps in transformers alone, in which no prompt and no answer is read twice, neither with
    gradient nor without."""

    def __init__(self, folder: Path, case: dict) -> None:
        self._policy = load_policy(folder)
        self._model, self._case = self._policy.model, case
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE, fused=True)

    def step(self, texts: Sequence[str], number: int) -> None:
        """Samples, scores and learns."""
        prompts = torch.tensor([self._policy.dialogue.open(text) for text in texts])
        learn = self._learn_both_turns if self._case["confidences"] else self._learn_answers
        shares = [t.chunk(math.ceil(len(texts) / SHARE)) for t in (prompts, *self._sample(prompts))]
        for share in zip(*shares, strict=True):
            (learn(*share) / len(shares[0])).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _sample(self, prompts: Tensor) -> list[Tensor]:
        """The rows of each turn, one cache for all."""
        case, cache = self._case, DynamicCache(config=self._model.config)
        turns = [self._continue(prompts, cache, case["answers"], case["answer"])]
        if case["confidences"]:
            question = torch.tensor(self._policy.dialogue.reply(QUESTION, ()))
            asked = torch.cat([turns[0], question.expand(len(turns[0]), -1)], dim=1)
            turns.append(self._continue(asked, cache, case["confidences"], case["confidence"]))
        return turns

    def _continue(self, ids: Tensor, cache: DynamicCache, each: int, length: int) -> Tensor:
        """`each` continuations of every row of `ids` by `generate`, whose first tokens the cache
        has; `[R · each, T + length]`."""
        with torch.no_grad():
            known = cache.get_seq_length()
            self._model(ids[:, known:-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(each)
        ids = ids.repeat_interleave(each, dim=0)
        return self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
            past_key_values=cache,
        )

    def _learn_answers(self, prompts: Tensor, rows: Tensor) -> Tensor:
        cache, length = DynamicCache(config=self._model.config), prompts.shape[1]
        read = {"past_key_values": cache, "use_cache": True}
        first = self._model(prompts, **read, logits_to_keep=1).logits
        each = self._case["answers"]
        cache.batch_repeat_interleave(each)
        rest = self._model(rows[:, length:-1], **read).logits
        logits = torch.cat([first.repeat_interleave(each, 0), rest], dim=1)
        return self._compute_loss(logits, rows[:, length:], each) / rows[:, length:].numel()

    def _learn_both_turns(self, prompts: Tensor, answers: Tensor, rows: Tensor) -> Tensor:
        """Three levels of a cache with gradient: prompts, answers and question, confidences."""
        each, under = self._case["answers"], self._case["confidences"]
        answer, confidence = self._case["answer"], self._case["confidence"]
        cache, length = DynamicCache(config=self._model.config), prompts.shape[1]
        read = {"past_key_values": cache, "use_cache": True}
        first = self._model(prompts, **read, logits_to_keep=1).logits
        cache.batch_repeat_interleave(each)
        middle = rows[::under, length:-confidence]
        hidden = self._model.get_decoder()(middle, **read).last_hidden_state
        head = self._model.get_output_embeddings()
        said = torch.cat([first.repeat_interleave(each, 0), head(hidden[:, : answer - 1])], dim=1)
        asked = head(hidden[:, -1:])
        cache.batch_repeat_interleave(under)
        rest = self._model(rows[:, -confidence:-1], **read).logits
        stated = torch.cat([asked.repeat_interleave(under, 0), rest], dim=1)
        of_answers = self._compute_loss(said, answers[:, length:], each)
        of_confidences = self._compute_loss(stated, rows[:, -confidence:], under)
        return (of_answers + of_confidences) / (len(answers) * answer + len(rows) * confidence)

    def _compute_loss(self, logits: Tensor, chosen: Tensor, group: int) -> Tensor:
        """The policy gradient's loss, summed over tokens; groups of rows lie side by side."""
        texts = [self._policy.dialogue.read(row)[0] for row in chosen.tolist()]
        scores = torch.tensor([reward(text) for text in texts])
        advantages = group_advantages(scores, torch.arange(len(chosen)) // group)
        logprobs = logits.log_softmax(-1).gather(2, chosen[:, :, None])[:, :, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        return -(ratio * advantages[:, None]).sum()


def main(side: str, folder: Path) -> None:
    """A step for each line that arrives."""
    case = json.loads((folder / "case.json").read_text())
    steps = {"ours": OwnSteps, "plain": PlainSteps}[side](folder, case)
    for number, _ in enumerate(sys.stdin):
        first = number * case["prompts"] % len(case["texts"])
        began = time.process_time()
        steps.step(case["texts"][first : first + case["prompts"]], number)
        print(json.dumps({"cpu": time.process_time() - began}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
