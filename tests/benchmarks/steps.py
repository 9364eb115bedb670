"""Whole steps: RLCR beside `generate` and plain rows, GRPO beside TRL; `make bench` runs them."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from generation import generated, generated_both_turns
from harness import Spent, compared, in_turns, spent
from models import BEGIN, DEVICE, policy, save, text
from own_steps import RATE, OwnSteps, reward
from peers import PEERS, Peer, peer_python
from plain_rows import ROWS
from shapes import SHORT
from torch import Tensor

from rlx.credit import estimate_two_level, group_advantages
from rlx.spec import TurnSpec, TwoLevel, TwoTurnRolloutSpec

__all__ = ["grpo_step_vs_trl", "grpo_steps", "rlcr_step"]

ROUNDS = 5
QUESTION = text(SHORT.question, "question")
GRPO = {"prompts": 8, "prompt": 105, "answers": 8, "answer": 64}


def rlcr_step() -> list[dict]:
    """Both turns generated, credit, update, at (100, 60, 30, 12, 8, 4) and four prompts."""
    rollout = TwoTurnRolloutSpec(
        num_generations_answer=SHORT.answers,
        answer=TurnSpec(max_new_tokens=SHORT.answer),
        num_generations_confidence=SHORT.confidences,
        confidence=TurnSpec(template=QUESTION, max_new_tokens=SHORT.confidence),
    )
    ours = OwnSteps(rollout, partial(estimate_two_level, options=TwoLevel()), ROWS * SHORT.longest)
    weaker = "weaker: generate twice, plain rows, AdamW"
    kept = "generate with one cache, one row per trajectory, lean logits, AdamW"
    baselines = {"": (PlainSteps(), weaker), "_strongest": (StrongestSteps(), kept)}
    count = iter(range(10**6))

    def texts() -> list[str]:
        number = next(count)
        return [text(SHORT.prompt - 1, number, n) for n in range(SHORT.prompts)]

    def timed(side: PlainSteps) -> Callable[[], Spent]:
        return lambda: spent(lambda: side.step(texts()))

    sides = {"ours": lambda: spent(lambda: ours.step(texts(), next(count)))}
    sides |= {ending: timed(side) for ending, (side, _) in baselines.items()}
    took = in_turns(sides, ROUNDS)
    return [
        compared(f"rlcr_step{ending}", took[ending], took["ours"], baseline)
        for ending, (_, baseline) in baselines.items()
    ]


class PlainSteps:
    """An RLCR step as it is first written: no cache is kept and no prefix is shared."""

    def __init__(self) -> None:
        self._policy = policy()
        self._model = self._policy.model
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE)

    def step(self, texts: list[str]) -> None:
        """Generates answers, then confidences from contexts that are read again, and learns."""
        dialogue, shape = self._policy.dialogue, SHORT
        prompts = [dialogue.open(text) for text in texts]
        answers, confidences = self._sample(prompts, dialogue.reply(QUESTION, ()))
        of_answers = self._advantages(answers, shape.answer, shape.answers)
        of_confidences = self._advantages(confidences, shape.confidence, shape.confidences)
        self._learn(
            [
                (answers, shape.answer, of_answers),
                (confidences, shape.confidence, of_confidences),
            ]
        )

    def _sample(
        self, prompts: list[tuple[int, ...]], question: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        answers = generated(self._policy, prompts, SHORT.answers, SHORT.answer)
        asked = [(*answer, *question) for answer in answers.tolist()]
        return answers, generated(self._policy, asked, SHORT.confidences, SHORT.confidence)

    def _advantages(self, ids: Tensor, length: int, group: int) -> Tensor:
        texts = (self._policy.dialogue.read(row)[0] for row in ids[:, -length:].tolist())
        scores = torch.tensor([reward(text) for text in texts])
        return group_advantages(scores, torch.arange(len(ids)) // group)

    def _learn(self, kinds: list[tuple[Tensor, int, Tensor]]) -> None:
        tokens = sum(len(ids) * length for ids, length, _ in kinds)
        for ids, length, advantages in kinds:
            for rows, signs in zip(ids.split(ROWS), advantages.split(ROWS), strict=True):
                logits = self._model(rows, use_cache=False).logits[:, :-1]
                logprobs = torch.log_softmax(logits, dim=-1)
                chosen = logprobs.gather(2, rows[:, 1:, None])[:, -length:, 0]
                ratio = (chosen - chosen.detach()).exp()
                (-(ratio * signs[:, None]).sum() / tokens).backward()
        self._take_step()

    def _take_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


class StrongestSteps(PlainSteps):
    """The same step with one cache kept over both turns, and one row for each trajectory.

    The tokens of an answer learn in the row of its first confidence, and logits are computed only
    where a token learns.
    """

    def _sample(
        self, prompts: list[tuple[int, ...]], question: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        return generated_both_turns(self._policy, prompts, question)

    def _learn(self, kinds: list[tuple[Tensor, int, Tensor]]) -> None:
        (answers, answer, of_answers), (ids, confidence, of_confidences) = kinds
        begin, each = answers.shape[1] - answer, len(ids) // len(answers)
        signs = torch.zeros(ids.shape)
        signs[::each, begin : begin + answer] = of_answers[:, None]
        signs[:, -confidence:] = of_confidences[:, None]
        learns = torch.zeros(ids.shape, dtype=torch.bool)
        learns[::each, begin : begin + answer] = True
        learns[:, -confidence:] = True
        tokens, head = int(learns.sum()), self._model.get_output_embeddings()
        for rows, own, weights in zip(*(x.split(ROWS) for x in (ids, learns, signs)), strict=True):
            hidden = self._model.get_decoder()(rows, use_cache=False).last_hidden_state
            logprobs = torch.log_softmax(head(hidden[:, :-1][own[:, 1:]]), dim=-1)
            chosen = logprobs.gather(1, rows[own][:, None])[:, 0]
            ratio = (chosen - chosen.detach()).exp()
            (-(ratio * weights[own]).sum() / tokens).backward()
        self._take_step()


def grpo_step_vs_trl() -> list[dict]:
    """One GRPO step from 8 prompts of 105 tokens, 8 answers of 64 each, in processes in turns."""
    took = grpo_steps(peer_python("trl"), GRPO)
    return [compared("grpo_step_vs_trl", took["trl"], took["rlx"], "TRL 1.16 GRPOTrainer")]


def grpo_steps(trl_python: Path, sizes: Mapping[str, int]) -> dict[str, list[Spent]]:
    """What steps of TRL and of rlx cost, on the device of this process.

    Args:
        trl_python: of an environment with TRL.
        sizes: prompts, tokens of a prompt, answers to each, tokens of an answer.
    """
    texts = [text(sizes["prompt"] - 1, n) for n in range(64)]
    case = {**sizes, "rows": sizes["prompts"] * sizes["answers"], "device": DEVICE}
    row = sizes["prompt"] + sizes["answer"]
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save(model)
        theirs = {**case, "texts": [BEGIN + text for text in texts]}
        ours = {**case, "texts": texts, "tokens": ROWS * row}
        cases = {name: Path(folder) / f"{name}.json" for name in ("theirs", "ours")}
        cases["theirs"].write_text(json.dumps(theirs))
        cases["ours"].write_text(json.dumps(ours))
        command = [trl_python, PEERS / "trl_steps.py", model, cases["theirs"]]
        own = [sys.executable, here / "own_steps.py", cases["ours"]]
        with (
            Peer.started(command, Path(folder) / "trl.log") as trl,
            Peer.started(own, Path(folder) / "own.log") as rlx,
        ):
            trl.answer()
            rlx.answer()
            return in_turns({"trl": trl.spent, "rlx": rlx.spent}, ROUNDS)
