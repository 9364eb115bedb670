"""What slow sessions cost a step, by the clock; `make bench BENCH=slow_sessions` runs it.

Programs of agents, and live sessions of an environment, wait by sleeping; the model is a hash that
sleeps for a batch. Also what a judge in trouble costs, and what an agent that forks its history has
the learner compute.
"""

import hashlib
import os
import random
import re
import statistics
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from harness import row

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "system" / "agents"))

from judge_server import JudgeServer
from programs import cut, die, post
from speech import Characters, Hashing

from rlx.agents import AgentHost, ProgramStarter
from rlx.batch import build_token_batch
from rlx.learner import Ranks
from rlx.learner.pack import RankMicroBatches
from rlx.model import Vocabulary, build_vocabulary_dialogue
from rlx.plugin import Action, Problem, Reply, Sample, StatefulEnvironment
from rlx.reward import RewardJob, RewardPool, SessionHost
from rlx.rollout import RolloutTree, build_rollout_plan, sample_rollout_trees
from rlx.spec import AgentRolloutSpec, EnvironmentRolloutSpec
from rlx_plugins.judge import Judge

__all__ = ["forked_history", "slow_sessions", "troubled_judge"]

PROBLEMS, COUNT, TURNS = 4, 5, 8
USUAL, SLOW = 0.5, 5.0
"""Seconds that a session waits in a turn; in a tenth of all turns it takes the longer time."""
MANY, MANY_TURNS = 20, 3
"""Problems of ten sessions each, and their turns, where only some are disturbed."""
PER_BATCH = 0.05
PATIENCE = 0.1
JUDGEMENTS, AT_ONCE, TRY_SECONDS = 1000, 64, 4.0
TROUBLES = ("429", "500", "garbage", "form", "cut", "never")
DIALOGUE = build_vocabulary_dialogue(Vocabulary.build_bytes())
FOLDERS = [str(Path(__file__).parent), *sys.path[:2]]
"""Where the processes that run programs find their modules."""
POLICY = SimpleNamespace(
    dialogue=DIALOGUE, tokenizer=DIALOGUE.tokenizer, end_ids=DIALOGUE.end_ids, vocabulary=300
)


class Sleeping(Hashing):
    """Sleeps for every batch."""

    def generate(self, requests: Any, sampling: Any) -> Any:
        time.sleep(PER_BATCH)
        return super().generate(requests, sampling)


class Speaking(Sleeping):
    """Answers in the tokens of a dialogue."""

    def tokens(self, text: str) -> Any:
        ids = (*DIALOGUE.encode(text.removesuffix("\0")), *DIALOGUE.end_ids[: text.endswith("\0")])
        return ids, tuple(-n / 8 for n in range(len(ids)))


# Waiting ------------------------------------------------------------------------------------------


def draw_wait(what: str, name: object, turn: int) -> float:
    """Seconds that a session waits before a turn; `what` is none, steady, tenth or random."""
    if what == "none":
        return 0.0
    drawn = random.Random(f"{name}/{turn}").random()
    if what == "random":
        return 2.0 * drawn
    return SLOW if what == "tenth" and drawn < 0.1 else USUAL


def play(problem: Any, address: str, key: str) -> None:
    """A program: talks, waits as its problem says, and reports how long it took."""
    begun = time.monotonic()
    fields, place = problem["fields"], problem["place"]
    what = fields["what"][place % len(fields["what"])]
    if what in ("cut", "die"):
        {"cut": cut, "die": die}[what](problem, address, key)
        return
    name = f"{problem['id']}/{place}"
    messages = [{"role": "user", "content": f"{name} begins"}]
    for turn in range(1, fields["turns"] + 1):
        reply = post(address, "/chat/completions", {"model": "m", "messages": messages})
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        time.sleep(draw_wait(what, name, turn))
    post(address, "/info", {"what": what, "seconds": time.monotonic() - begun})


class Waits(StatefulEnvironment):
    """An environment that waits in every turn."""

    kinds: ClassVar[tuple[str, ...]] = ("say",)
    replayable: ClassVar[bool] = False

    def open(self, problem: Any, seed: int) -> Any:
        return (problem["what"][0], seed)

    def play(self, game: Any, action: Action) -> Reply:
        wait = draw_wait(*game, action.number)
        time.sleep(wait)
        return Reply(kind="say", observation="and then?", info={"wait": wait})


def set_module_path() -> None:
    """Lets the processes that run programs import this module."""
    os.environ["PYTHONPATH"] = os.pathsep.join(FOLDERS)


def list_problems(count: int, *what: str, turns: int) -> list[Problem]:
    return [
        Problem(id=f"p{n}", prompt=f"p{n}?", fields={"what": what, "turns": turns})
        for n in range(count)
    ]


def sample_agents(
    problems: list[Problem],
    starter: ProgramStarter,
    count: int,
    turns: int,
    patience: float | None,
) -> list[RolloutTree]:
    settings = {"function": "sessions:play", "num_generations": count, "max_turns": turns}
    limits = {"programs": len(problems) * count, "patience": patience, "deadline": 600}
    spec = AgentRolloutSpec.model_validate({**settings, **limits})
    return sample_rollout_trees(
        build_rollout_plan(spec), problems, range(len(problems)),
        Speaking(["this", "that", "neither"]), DIALOGUE, AgentHost(spec, POLICY, starter),
    )  # fmt: skip


def sample_live(problems: list[Problem], pool: RewardPool, patience: float | None) -> Any:
    settings = {"environment": {"plugin": "waits"}, "num_generations": COUNT, "max_turns": TURNS}
    waits = {"live": {"sessions": len(problems) * COUNT}, "patience": patience}
    spec = EnvironmentRolloutSpec.model_validate({**settings, **waits})
    plan = build_rollout_plan(spec, replayable=False)
    limits = spec.resolve_limits(replayable=False)
    if patience is None:
        limits = type(limits)(limits.call, limits.episode, None, limits.sessions, limits.on_error)
    host = SessionHost(Waits(), pool, limits)
    model = Sleeping(("this", "that", "neither"))
    return sample_rollout_trees(plan, problems, range(len(problems)), model, Characters(), host)


def take_seconds(sample: Any) -> tuple[float, list[RolloutTree]]:
    begun = time.monotonic()
    trees = sample()
    return time.monotonic() - begun, trees


def find_longest_wait(trees: list[RolloutTree], what: str) -> float:
    """Seconds that the session which waits longest waits in all."""
    waits: dict[object, float] = {}
    for tree in trees:
        for at in tree.policy_segments:
            turn = tree.segments[at]
            if "wait" in turn.info:
                above = [n for n in tree.path(at) if tree.segments[n].author == "policy"]
                waits[tree.problem.id, above[0]] = (
                    waits.get((tree.problem.id, above[0]), 0.0) + turn.info["wait"]
                )
    if not waits:  # of programs
        names = [f"{tree.problem.id}/{place}" for tree in trees for place in range(COUNT)]
        totals = [sum(draw_wait(what, name, t) for t in range(1, TURNS + 1)) for name in names]
        return max(totals)
    return max(waits.values())


def slow_sessions() -> list[dict]:
    """Steps with a slow tenth, and sessions that others disturb, beside lockstep."""
    set_module_path()
    figures = []
    with RewardPool(workers=1, memory_mb=1024) as pool:
        starter = pool.keep(ProgramStarter)
        kinds = {
            "live": lambda what, patience: sample_live(
                list_problems(PROBLEMS, what, turns=TURNS), pool, patience
            ),
            "agents": lambda what, patience: sample_agents(
                list_problems(PROBLEMS, what, turns=TURNS), starter, COUNT, TURNS, patience
            ),
        }
        for kind, sample in kinds.items():
            sample("none", None)  # starts processes
            for suffix, patience in (("", PATIENCE), ("_lockstep", None)):
                took, trees = take_seconds(partial(sample, "tenth", patience))
                longest = find_longest_wait(trees, "tenth")
                figures.append(
                    row(
                        f"slow_tenth_{kind}{suffix}",
                        [took / (longest + TURNS * PER_BATCH)],
                        f"the session that waits longest, {longest:.1f} s, and {TURNS} batches; it "
                        f"took {took:.1f} s",
                        "times its share of waiting",
                    )
                )
        usual = statistics.median(_time_undisturbed(starter, PATIENCE, "steady"))
        disturbed = ("steady", "random", "steady", "cut", "steady", "random", "steady", "die")
        for suffix, patience in (("", PATIENCE), ("_lockstep", None)):
            seconds = _time_undisturbed(starter, patience, *disturbed)
            figures.append(
                row(
                    f"undisturbed_agents{suffix}",
                    [each / usual for each in seconds],
                    f"200 of which none is disturbed, {usual:.1f} s",
                    "times as long",
                )
            )
    return figures


def _time_undisturbed(starter: ProgramStarter, patience: float | None, *what: str) -> list[float]:
    """Seconds of each steady session among 200."""
    problems = list_problems(MANY, *what, turns=MANY_TURNS)
    trees = sample_agents(problems, starter, 10, MANY_TURNS, patience)
    ends = [tree.segments[at].info for tree in trees for at in tree.policy_segments]
    return [info["seconds"] for info in ends if info.get("what") == "steady"]


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
    set_module_path()
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
