"""What a judge in trouble costs by the clock, and what an agent that forks its history has the
learner compute; `make bench BENCH=troubled_judge,forked_history` runs them."""

import hashlib
import os
import random
import re
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import row

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "system" / "agents"))

from judge_server import JudgeServer
from programs import post
from speech import Hashing

from rlx.agents import AgentHost, ProgramStarter
from rlx.batch import build_token_batch
from rlx.learner import Ranks
from rlx.learner.pack import RankMicroBatches
from rlx.model import Vocabulary, build_vocabulary_dialogue
from rlx.plugin import Problem, Sample
from rlx.reward import RewardJob, RewardPool
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.spec import AgentRolloutSpec
from rlx_plugins.judge import Judge

__all__ = ["forked_history", "troubled_judge"]

JUDGEMENTS, AT_ONCE, TRY_SECONDS = 1000, 64, 4.0
TROUBLES = ("429", "500", "garbage", "form", "cut", "never")
DIALOGUE = build_vocabulary_dialogue(Vocabulary.build_bytes())
FOLDERS = [str(Path(__file__).parent), *sys.path[:2]]
"""Where the processes that run programs find their modules."""
POLICY = SimpleNamespace(
    dialogue=DIALOGUE, tokenizer=DIALOGUE.tokenizer, end_ids=DIALOGUE.end_ids, vocabulary=300
)


class Speaking(Hashing):
    """Answers in the tokens of a dialogue."""

    def tokens(self, text: str) -> Any:
        ids = (*DIALOGUE.encode(text.removesuffix("\0")), *DIALOGUE.end_ids[: text.endswith("\0")])
        return ids, tuple(-n / 8 for n in range(len(ids)))


# Judges -------------------------------------------------------------------------------------------


def plan_troubles(number: int) -> list[str]:
    """Up to two troubles before the reply to a prompt."""
    rng = random.Random(number)
    return [rng.choice(TROUBLES) for share in (0.3, 0.14) if rng.random() < share]


def draw_reply_seconds(number: int) -> float:
    """Seconds that a reply to a prompt takes."""
    return random.Random(f"{number} takes").uniform(0.5, 2.5)


def find_number(prompt: str) -> int:
    """The number in a prompt."""
    return int(re.search(r"answer number (\d+)", prompt)[1])


def troubled_judge() -> list[dict]:
    """Judgements by a server in trouble, beside what its replies take at best."""
    server = JudgeServer(
        lambda prompt: f'{{"score": {find_number(prompt) % 11}}}',
        lambda prompt: plan_troubles(find_number(prompt)),
        lambda prompt: draw_reply_seconds(find_number(prompt)),
    )
    judge = Judge(
        model="m", base_url=server.url, key=None, at_once=AT_ONCE, try_seconds=TRY_SECONDS
    )
    samples = [
        Sample(id="a", problem={"question": "?"}, turn="a", number=1, response=f"answer number {n}")
        for n in range(JUDGEMENTS + 1)
    ]
    jobs = [RewardJob(judge, (sample,), 600.0) for sample in samples]
    with RewardPool(1, 1024) as pool:
        pool.score(jobs[-1:])  # starts the process
        begun = time.monotonic()
        outcomes = pool.score(jobs[:-1])
        took = time.monotonic() - begun
    server.close()
    values = [outcome.verdicts[0].value for outcome in outcomes]
    assert values == [number % 11 / 10 for number in range(JUDGEMENTS)]
    best, tries = 0.0, 0
    for number in range(JUDGEMENTS):
        troubles = plan_troubles(number)
        replies = 1 + troubles.count("form")
        best += draw_reply_seconds(number) * replies + TRY_SECONDS * troubles.count("never")
        tries += 1 + len(troubles)
    best /= AT_ONCE
    text = f"{AT_ONCE} at a time without a pause, {best:.1f} s for {tries} tries"
    return [row("troubled_judge", [took / best], f"{text}; it took {took:.1f} s", "times as long")]


# Forks --------------------------------------------------------------------------------------------


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
            Speaking([f"{n} " * 8 for n in range(50)]), DIALOGUE, AgentHost(spec, POLICY, starter),
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
