"""Plans, each made once: starting the scoring processes takes most of the time."""

from functools import lru_cache
from pathlib import Path

import pytest
from guests import write_distribution

from rlx.plan import check_file
from rlx.plan.report import build_plan

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@lru_cache
def planned(name, *overrides):
    """The plan of an experiment, with `path=value` over it."""
    path = EXPERIMENTS / f"{name}.yaml"
    return build_plan(path, *check_file(path, overrides))


@pytest.fixture
def plan(monkeypatch):
    """Plans without data of the hub, which would be asked for them again and again."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    return planned


@pytest.fixture
def guests(tmp_path, monkeypatch):
    """Rewards of another distribution, each wrong in a way of its own."""
    names = ("gives_nan", "raises", "hangs", "abstains", "scribbles")
    points = "".join(f"{name} = rlx_plan_guest:{name}\n" for name in names)
    points = f"[rlx.rewards]\n{points}"
    write_distribution(tmp_path, "rlx-plan-guest", points, rlx_plan_guest=GUESTS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def game(tmp_path, monkeypatch):
    """An environment of another distribution, with tasks that have a script for it, or none."""
    points = "[rlx.environments]\ngame = rlx_plan_game:Game\n[rlx.tasks]\n"
    points += "silent = rlx_plan_game:Silent\nscripted = rlx_plan_game:Scripted\n"
    points += "[rlx.rewards]\neven = rlx_plan_game:even\n"
    write_distribution(tmp_path, "rlx-plan-game", points, rlx_plan_game=GAME)
    monkeypatch.syspath_prepend(tmp_path)


GUESTS = '''
import time
from rlx.plugin import reward

print("imported")

@reward
def gives_nan(sample):
    """No number, for one sort of text."""
    return float("nan") if "</answer>" in sample.response else 0.0

@reward
def raises(sample):
    """Never works."""
    raise ValueError("out of order")

@reward
def scribbles(sample):
    """Says what it sees."""
    print("seen\\x1b[2J")
    return float(len(sample.response) % 2)

@reward
def hangs(sample):
    """Never ends."""
    time.sleep(60)  # scenario

@reward
def abstains(sample):
    """Never says anything."""
    return None
'''

GAME = '''
import time
from typing import Literal
from rlx.plugin import Environment, Plugin, Problem, Step, reward

class Game(Environment):
    """Says 7 until it was given an answer often enough."""

    kinds = ("said", "silent")
    how: Literal["well", "raises", "hangs"] = "well"
    on: int = 2
    answers: int = 2
    words: int = 1

    def reset(self, problem, seed):
        if self.on == 0:
            raise ValueError("no board")
        return 0

    def step(self, state, action):
        if action.number == self.on and self.how != "well":
            time.sleep(60 if self.how == "hangs" else 0)  # scenario
            raise ValueError("out of dice")
        said = "answer" in action.spans
        return Step(
            kind="said" if said else "silent",
            state=state + said,
            observation="\\n".join(["7"] * self.words),
            done=state + said == self.answers or (action.forced and said),
        )

class Silent(Plugin):
    """Sums."""

    def problem(self, split, index, seed):
        return Problem(id=str(index), prompt=f"{index + 1}+1=", fields={"answer": str(index + 2)})

    def demonstration(self, problem, seed):
        raise NotImplementedError

class Scripted(Silent):
    """The same with a script, which says how often it was answered and what was shown last."""

    fails_in: int = 0

    def lesson(self, index, seed):
        return self.problem("train", index, seed)

    def act(self, problem, turns, observations, seed):
        if len(turns) + 1 == self.fails_in:
            raise KeyError("page")
        if len(turns) != len(observations):
            raise ValueError("what was said was not answered")
        shown = observations[-1] if observations else "0"
        return f"<think>{len(turns)}={shown}</think><answer>{seed % 10}</answer>"

@reward
def even(sample):
    """1 for an even number."""
    return float(sample.spans.get("answer", "1")[-1] in "02468")
'''
