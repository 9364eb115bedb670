"""The model that benchmarks share: a Qwen2 of 2.4 million parameters that reads characters."""

import functools
import json
import os
import random
import socket
import string
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlx.model import PlainDialogue, Policy
from rlx.spec import RunnerSpec

if TYPE_CHECKING:
    from rlx.learner import Ranks

__all__ = ["BEGIN", "DEVICE", "DTYPE", "alone", "policy", "save", "text"]

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
LONGEST = 2048
DEVICE = os.environ.get("RLX_TEST_DEVICE", "cpu")
SIZES: dict[str, int] = json.loads(os.environ.get("RLX_BENCH_SIZES", "{}"))
"""What another model than the one of 2.4 million parameters differs in, for larger devices."""
DTYPE = "float32" if DEVICE == "cpu" else "bfloat16"
BEGIN = "<bos>"
"""What the dialogue puts before a prompt, for peers that read text alone."""


def policy(seed: int = 0) -> Policy:
    """The model with random weights, or the one in the folder RLX_BENCH_MODEL. None of its tokens
    ends a turn: all lengths are the limit."""
    if folder := os.environ.get("RLX_BENCH_MODEL"):
        return _load_policy(folder)
    tokenizer = characters()
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        **SIZES,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        **sizes,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    return Policy(model.eval(), tokenizer, PlainDialogue(tokenizer, ()), end_ids=())


def _load_policy(folder: str) -> Policy:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Policy(model.eval(), tokenizer, PlainDialogue(tokenizer, ()), end_ids=())


def characters() -> PreTrainedTokenizerFast:
    """One token for each character, and the special ones."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def save(folder: Path) -> None:
    """Writes the model where a peer in another environment finds it."""
    policy().save(folder)


def text(length: int, *seeds: object) -> str:
    """Random letters that read as as many tokens."""
    return "".join(random.Random(repr(seeds)).choices(string.ascii_lowercase + " ", k=length))


@functools.cache
def alone() -> "Ranks":
    """This process as the only rank."""
    from rlx.learner import join_ranks  # a sampler starts without it

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return join_ranks(RunnerSpec(device=DEVICE))
