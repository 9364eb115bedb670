"""The model that the steps share, and this process as the only rank."""

import functools
import os
import socket
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.model import PlainDialogue, Policy
from rlx.spec import RunnerSpec

if TYPE_CHECKING:
    from rlx.learner import Ranks


def policy() -> Policy:
    """The model in the folder RLX_BENCH_MODEL. None of its tokens ends a turn: all lengths are the
    limit."""
    folder = os.environ["RLX_BENCH_MODEL"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Policy(model.eval(), tokenizer, PlainDialogue(tokenizer, ()), end_ids=())


@functools.cache
def alone() -> "Ranks":
    """This process as the only rank."""
    from rlx.learner import join_ranks  # a sampler starts without it

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return join_ranks(RunnerSpec(device="cpu"))
