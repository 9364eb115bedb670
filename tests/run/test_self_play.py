"""A run in self-play: what is trained, recorded, rescored and compared."""

from types import SimpleNamespace

import pytest
from guests import write_distribution
from pages import Page, dashboard

from rlx.reward import RewardEntry, RewardTable
from rlx.run.training import ScoredTrees, _gather_shares, _split_evenly

GUEST = '''
from typing import ClassVar

from rlx.plugin import Environment, Plugin, Problem, Step


class Pile(Environment):
    """A player takes one or two of a pile, by the length of its text; the last one wins."""

    kinds: ClassVar[tuple[str, ...]] = ("take",)
    self_play: ClassVar[bool] = True

    def reset(self, problem, seed):
        return problem["pile"]

    def step(self, state, action):
        left = max(0, state - 1 - len(action.text) % 2)
        done = left == 0
        mine = 0 if action.player is None else action.player
        if not done and action.player is None:
            left -= 1
        return Step(
            kind="take",
            state=left,
            observation=f"{left}:",
            done=left == 0,
            info={"won": done},
            player=1 - mine,
        )


class Piles(Plugin):
    """Piles of three to five."""

    demonstrates: ClassVar[bool] = False

    def problem(self, split, index, seed):
        pile = 3 + index % 3
        return Problem(id=f"{split}/{pile}", prompt=f"{pile}:", fields={"pile": pile})

    def demonstration(self, problem, seed):
        raise NotImplementedError
'''
ENTRIES = """[rlx.environments]
pile = rlx_pile:Pile

[rlx.tasks]
pile = rlx_pile:Piles
"""
YAML = """
name: pile
model:
  kind: tiny
  tokenizer: bytes
  hidden_size: 32
  heads: 1
  kv_heads: 1
  layers: 1
  intermediate_size: 32
  max_position: 64
  initializer_range: 0.5
  warm_start: null
task: {plugin: pile}
rollout:
  schedule: environment
  environment: {plugin: pile}
  self_play: {learn: both}
  prompts_per_step: 2
  num_generations: 4
  max_turns: 5
  turn: {max_new_tokens: 3, spans: []}
  observation: inline
rewards:
  global:
    won: {plugin: info, key: won}
estimator: {name: grpo}
phases: [{name: both, steps: 2}]
evaluation: {problems: 4, correct: won}
tracking: {mlflow: null}
"""


@pytest.fixture(scope="module")
def finished(own_home):
    guest = own_home.folder / "pile"
    write_distribution(guest, "rlx-pile", ENTRIES, rlx_pile=GUEST)
    own_home.paths.append(str(guest))
    (own_home.folder / "pile.yaml").write_text(YAML)
    return own_home.submit("pile.yaml")


def test_both_players_are_recorded_and_learn(own_home, finished):
    seconds = 0
    for _, trees, _ in own_home.bodies(finished):
        assert len(trees) == 4
        for number, tree in enumerate(trees):
            assert tree["problem_id"].endswith("/player 1") == bool(number % 2)
            assert tree["role"] == "trained"
            played = any(segment["author"] == "policy" for segment in tree["segments"])
            assert bool(tree["rows"]) == played
            assert len({row["group"] for row in tree["rows"]}) <= 1
            seconds += played and number % 2
        won = [
            sum(r["raw"] for s in tree["segments"] for r in s["global_rewards"] or ())
            for tree in trees
        ]
        for first, second in zip(won[::2], won[1::2], strict=True):
            assert first + second <= 4  # at most one player wins each of four games
    assert seconds
    names = own_home.metrics(finished.id)
    assert {"players/won/0", "players/won/1"} <= set(names)


def test_what_is_stored_holds_together_and_is_rescored_to_the_bit(own_home, finished):
    own_home.check_record(finished.id)


def test_the_dashboard_says_whose_turns_are_whose(own_home, finished):
    client = dashboard(f"sqlite:///{own_home.path}/registry.db")
    address = f"/runs/{finished.id}/rollouts/1"
    first, *_, last = client.get(f"{address}.json").json()["trees"]
    assert (first["player"], last["player"]) == (0, 1)
    page = Page(client.get(address).text).text
    assert "player 0" in page and "player 1" in page
    row = last["rows"][0]["row"]
    assert "player 1" in Page(client.get(f"{address}/{row}").text).text


def test_ranks_give_their_trees_back_in_the_order_of_the_problems():
    def build_share(rank):
        problems = range(rank, 3, 2)
        trees = [f"{problem}/{player}" for problem in problems for player in (0, 1)]
        entry = {
            (t, 1): {"won": RewardEntry(name, 1.0, 1.0, "scored")} for t, name in enumerate(trees)
        }
        return trees, RewardTable(entry, frozenset(), {})

    shares = [build_share(rank) for rank in (0, 1)]
    context = SimpleNamespace(ranks=SimpleNamespace(count=2, gather=lambda share: shares))
    merged = _gather_shares(context, ScoredTrees(*shares[0], 0.0, 0.0), 3, 2)
    assert merged.trees == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"]
    named = {t: entries["won"].name for (t, _), entries in merged.table.turns.items()}
    assert [named[t] for t in range(6)] == merged.trees


def test_problems_are_sampled_in_parts_of_about_the_same_size():
    assert [list(range(7)[part]) for part in _split_evenly(7, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert _split_evenly(7, None) == [slice(0, 7)]
    assert _split_evenly(0, 3) == _split_evenly(0, None) == [slice(0, 0)], "a rank without any"
