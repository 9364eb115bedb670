"""What an agent that forks its history has the learner compute; `make bench` runs it."""

import hashlib
import os
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import row

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "system" / "agents"))

from programs import post
from speech import Speaking

from rlx.agents import AgentHost, ProgramStarter
from rlx.batch import build_token_batch
from rlx.learner import Ranks
from rlx.learner.pack import RankMicroBatches
from rlx.model import Vocabulary, build_vocabulary_dialogue
from rlx.plugin import Problem
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.spec import AgentRolloutSpec

__all__ = ["forked_history"]

DIALOGUE = build_vocabulary_dialogue(Vocabulary.build_bytes())
FOLDERS = [str(Path(__file__).parent), *sys.path[:2]]
"""Where the processes that run programs find their modules."""
POLICY = SimpleNamespace(
    dialogue=DIALOGUE, tokenizer=DIALOGUE.tokenizer, end_ids=DIALOGUE.end_ids, vocabulary=300
)


def fork(problem: Any, address: str, key: str) -> None:
    """A program: writes four turns, goes on with one of them, and so on, six times."""
    words = hashlib.sha256(problem["id"].encode()).hexdigest()
    messages = [{"role": "user", "content": f"{words} begins"}]
    for turn in range(6):
        body = {"model": "m", "messages": messages, "n": 4}
        choices = post(address, "/chat/completions", body)["choices"]
        said = choices[(turn + problem["place"]) % 4]["message"]
        messages += [said, {"role": "user", "content": f"{words} goes on"}]


def forked_history() -> list[dict]:
    """Tokens that the learner computes for trees of forks, beside one row for each call."""
    os.environ["PYTHONPATH"] = os.pathsep.join(FOLDERS)  # of the processes that run programs
    settings = {"function": "sessions:fork", "num_generations": 4, "max_turns": 24}
    spec = AgentRolloutSpec.model_validate({**settings, "deadline": 600})
    problems = [Problem(id=f"p{n}", prompt=f"p{n}?", fields={}) for n in range(4)]
    with closing(ProgramStarter()) as starter:
        trees = sample_rollout_trees(
            build_rollout_plan(spec), problems, range(len(problems)),
            Speaking(DIALOGUE, [f"{n} " * 8 for n in range(50)]), DIALOGUE,
            AgentHost(spec, POLICY, starter),
        )  # fmt: skip
    batch = build_token_batch(trees)
    ranks = Ranks(0, 1, torch.device("cpu"))
    packed = RankMicroBatches(batch, batch.is_own, 1 << 14, ranks, merge=True)
    calls = [len(tree.token_ids(at)) for tree in trees for at in tree.policy_segments]
    text = (
        f"a row for each of {len(calls)} calls, with all that the model read: {sum(calls)} tokens"
    )
    return [
        row("forked_history_tokens", [sum(calls) / packed.computed_tokens], text,
            "times fewer tokens"),
    ]  # fmt: skip
