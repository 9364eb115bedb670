"""Steps of a real model on prompts that begin alike; `make bench` runs them.

SmolLM2-135M-Instruct in float32 reads a system message, worked examples and a question about a
word, over 400 tokens of which the last few differ. Beside rlx stand the strongest plain form of
transformers, one cache in sampling and one with gradient in the update, and TRL. All three read the
same token ids, and lengths are forced.
"""

import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import torch
from harness import Spent, compared, in_turns, spent
from models import policy
from own_steps import RATE, OwnSteps, reward
from peers import PEERS, Peer, peer_python
from torch import Tensor
from transformers import DynamicCache

from rlx.credit import estimate_two_level, group_advantages
from rlx.model import Policy, build_policy
from rlx.plan import read_spec
from rlx.spec import TurnSpec, TwoLevel, TwoTurnRolloutSpec

ROOT = Path(__file__).parents[2]
WORDS = ROOT / "experiments" / "smollm2" / "train.jsonl"
TRL = "TRL 1.16 GRPOTrainer, its output layer at every position, as on every CPU"
CACHES = "generate with one cache, a cache with gradient, fused AdamW"
LONGEST = 400
"""Tokens that examples fill."""
PROMPTS, ANSWERS, ANSWER = 4, 8, 32
TRL_ROWS = 4
TREES, TREE_ANSWERS, CONFIDENCES, CONFIDENCE = 6, 4, 4, 12
TOKENS = 16_384
"""Packed tokens of a micro-batch, the default."""
QUESTION = (
    "<|im_end|>\n<|im_start|>user\nHow sure are you, from 0 to 1?<|im_end|>\n"
    "<|im_start|>assistant\n<confidence>"
)
ROUNDS = 3


def smollm2_grpo_step() -> list[dict]:
    """Sampling, credit and update of 8 answers of 32 tokens each, to 4 prompts and to 8."""
    python = peer_python("trl")
    with real_model() as folder:
        texts = build_prompts()
        trl = [python, PEERS / "trl_steps.py", folder]
        with _start_own(folder, texts, PROMPTS) as ours:  # with the plain form: over 24 GB
            with Peer.started([*trl, folder / "case.json"], folder / "trl.log") as theirs:
                theirs.answer()
                sides = {"ours": ours.spent, "theirs": theirs.spent}
                took = {"_vs_trl": (TRL, in_turns(sides, ROUNDS))}
            took["_strongest"] = (CACHES, _take_turns_with_plain(ours, texts, PROMPTS))
        with _start_own(folder, texts, 2 * PROMPTS) as ours:
            what = f"{CACHES}, {2 * PROMPTS} prompts"
            took["_strongest_8"] = (what, _take_turns_with_plain(ours, texts, 2 * PROMPTS))
    return [
        compared(f"smollm2_grpo_step{name}", turns["theirs"], turns["ours"], what)
        for name, (what, turns) in took.items()
    ]


@contextmanager
def _start_own(folder: Path, texts: list[str], prompts: int) -> Iterator[Peer]:
    """A process of our own steps, whose case is in `folder`; TRL's micro-batch is smaller than
    all rows, which take 18 GB."""
    case = {"prompts": prompts, "answers": ANSWERS, "answer": ANSWER, "rows": TRL_ROWS}
    case |= {"texts": texts, "tokens": TOKENS}
    (asked := folder / "case.json").write_text(json.dumps(case))
    own = [sys.executable, Path(__file__).with_name("own_steps.py"), asked]
    with Peer.started(own, folder / "own.log") as ours:
        ours.answer()
        yield ours


def _take_turns_with_plain(ours: Peer, texts: list[str], prompts: int) -> dict[str, list[Spent]]:
    plain = PlainSteps(partial(_sample_answers, each=ANSWERS), _learn_answers)
    numbers = count()

    def take() -> Spent:
        return spent(lambda: plain.step(_choose(texts, next(numbers), prompts)))

    return in_turns({"ours": ours.spent, "theirs": take}, ROUNDS)


def smollm2_rlcr_step() -> list[dict]:
    """Both turns, credit and update of 6 prompts, 4 answers of 32, 4 confidences of 12 each."""
    with real_model():
        texts = build_prompts()
        rollout = TwoTurnRolloutSpec(
            num_generations_answer=TREE_ANSWERS,
            answer=TurnSpec(max_new_tokens=ANSWER),
            num_generations_confidence=CONFIDENCES,
            confidence=TurnSpec(template=QUESTION, max_new_tokens=CONFIDENCE),
        )
        ours = OwnSteps(rollout, partial(estimate_two_level, options=TwoLevel()), TOKENS)
        plain = PlainSteps(_sample_both_turns, _learn_both_turns)
        numbers = {"ours": count(), "plain": count()}

        def take(name: str, step: Callable[[list[str], int], None]) -> Spent:
            number = next(numbers[name])
            return spent(lambda: step(_choose(texts, number, TREES), number))

        sides = {
            "ours": partial(take, "ours", ours.step),
            "plain": partial(take, "plain", lambda chosen, _: plain.step(chosen)),
        }
        took = in_turns(sides, ROUNDS)
    return [compared("smollm2_rlcr_step_strongest", took["plain"], took["ours"], CACHES)]


@contextmanager
def real_model() -> Iterator[Path]:
    """A folder with the model, which `policy()` reads within the block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = read_spec(ROOT / "experiments" / "smollm2_grpo.yaml").spec.model
        build_policy(model, seed=0).save(folder)
        os.environ["RLX_BENCH_MODEL"] = name
        try:
            yield folder
        finally:
            del os.environ["RLX_BENCH_MODEL"]


def build_prompts() -> list[str]:
    """Prompts of the model's chat that begin alike and have as many tokens."""
    tokenizer = policy().tokenizer
    words = [json.loads(line) for line in WORDS.read_text().splitlines()]
    messages: list[dict[str, str]] = [{"role": "system", "content": "You know words."}]

    def render(question: str) -> str:
        asked = [*messages, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        return f"{text}<answer>"

    shown = iter(words)
    while len(tokenizer(render("first letter of a"))["input_ids"]) < LONGEST:
        word = next(shown)
        answer = f"<answer>{word['answer']}</answer>"
        messages.append({"role": "user", "content": word["question"]})
        messages.append({"role": "assistant", "content": answer})
    by_length: dict[int, list[str]] = defaultdict(list)
    for word in shown:
        text = render(word["question"])
        by_length[len(tokenizer(text)["input_ids"])].append(text)
    return max(by_length.values(), key=len)


def _choose(texts: list[str], number: int, count: int) -> list[str]:
    first = number * count % len(texts)
    return texts[first : first + count]


class PlainSteps:
    """Steps in transformers alone: `sample` gives rows, `learn` the loss that they add, of at most
    six prompts at a time.

    No prompt and no answer is read twice, neither with gradient nor without.
    """

    def __init__(
        self,
        sample: Callable[..., tuple[Tensor, ...]],
        learn: Callable[..., Tensor],
    ) -> None:
        self._policy, self._sample, self._learn = policy(), sample, learn
        parameters = self._policy.model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)

    def step(self, texts: list[str]) -> None:
        """Samples, scores and learns."""
        prompts = torch.tensor([self._policy.dialogue.open(text) for text in texts])
        turns = self._sample(self._policy, prompts)
        shares = [rows.chunk(math.ceil(len(texts) / TREES)) for rows in (prompts, *turns)]
        for share in zip(*shares, strict=True):
            (self._learn(self._policy, *share) / len(shares[0])).backward()
        torch.nn.utils.clip_grad_norm_(self._policy.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def continue_cached(
    speaker: Policy, ids: Tensor, cache: DynamicCache, each: int, length: int
) -> Tensor:
    """`each` continuations of every row of `ids` by `generate`, whose first tokens the cache has;
    `[R · each, T + length]`."""
    with torch.no_grad():
        known = cache.get_seq_length()
        speaker.model(ids[:, known:-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(each)
    ids = ids.repeat_interleave(each, dim=0)
    return speaker.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        min_new_tokens=length,
        max_new_tokens=length,
        pad_token_id=0,
        past_key_values=cache,
    )


def _sample_answers(speaker, prompts: Tensor, each: int) -> tuple[Tensor]:
    cache = DynamicCache(config=speaker.model.config)
    return (continue_cached(speaker, prompts, cache, each, ANSWER),)


def _learn_answers(speaker, prompts: Tensor, rows: Tensor) -> Tensor:
    cache, length = DynamicCache(config=speaker.model.config), prompts.shape[1]
    read = {"past_key_values": cache, "use_cache": True}
    first = speaker.model(prompts, **read, logits_to_keep=1).logits
    each = len(rows) // len(prompts)
    cache.batch_repeat_interleave(each)
    rest = speaker.model(rows[:, length:-1], **read).logits
    logits = torch.cat([first.repeat_interleave(each, 0), rest], dim=1)
    return _compute_loss(speaker, logits, rows[:, length:], each) / rows[:, length:].numel()


def _sample_both_turns(speaker, prompts: Tensor) -> tuple[Tensor, Tensor]:
    cache = DynamicCache(config=speaker.model.config)
    answers = continue_cached(speaker, prompts, cache, TREE_ANSWERS, ANSWER)
    question = torch.tensor(speaker.dialogue.reply(QUESTION, ()))
    asked = torch.cat([answers, question.expand(len(answers), -1)], dim=1)
    return answers, continue_cached(speaker, asked, cache, CONFIDENCES, CONFIDENCE)


def _learn_both_turns(speaker, prompts: Tensor, answers: Tensor, rows: Tensor) -> Tensor:
    """Three levels of a cache with gradient: prompts, answers with their question, confidences."""
    cache, length = DynamicCache(config=speaker.model.config), prompts.shape[1]
    read = {"past_key_values": cache, "use_cache": True}
    first = speaker.model(prompts, **read, logits_to_keep=1).logits
    cache.batch_repeat_interleave(TREE_ANSWERS)
    middle = rows[::CONFIDENCES, length:-CONFIDENCE]
    hidden = speaker.model.get_decoder()(middle, **read).last_hidden_state
    head = speaker.model.get_output_embeddings()
    said = torch.cat(
        [first.repeat_interleave(TREE_ANSWERS, 0), head(hidden[:, : ANSWER - 1])], dim=1
    )
    asked = head(hidden[:, -1:])
    cache.batch_repeat_interleave(CONFIDENCES)
    rest = speaker.model(rows[:, -CONFIDENCE:-1], **read).logits
    stated = torch.cat([asked.repeat_interleave(CONFIDENCES, 0), rest], dim=1)
    of_answers = _compute_loss(speaker, said, answers[:, length:], TREE_ANSWERS)
    of_confidences = _compute_loss(speaker, stated, rows[:, -CONFIDENCE:], CONFIDENCES)
    tokens = len(answers) * ANSWER + len(rows) * CONFIDENCE
    return (of_answers + of_confidences) / tokens


def _compute_loss(speaker, logits: Tensor, chosen: Tensor, group: int) -> Tensor:
    """The policy gradient's loss, summed over tokens; groups of rows lie side by side."""
    scores = torch.tensor([reward(speaker.dialogue.read(row)[0]) for row in chosen.tolist()])
    advantages = group_advantages(scores, torch.arange(len(chosen)) // group)
    logprobs = logits.log_softmax(-1).gather(2, chosen[:, :, None])[:, :, 0]
    ratio = (logprobs - logprobs.detach()).exp()
    return -(ratio * advantages[:, None]).sum()
