"""What `rlx check` asks of many turns: sound records hold, and what was changed is found."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rows import each_row
from trees import conversation

from rlx.batch import TokenBatch, build_token_batch
from rlx.phase_setup import CreditRules, PhaseSetup, build_setup
from rlx.plan import check_file
from rlx.record import TrainedRows
from rlx.record.rollouts import StoredStep, read_step, rollout_table
from rlx.results.check import IDENTITIES, IdentityTally, check_step
from rlx.reward import RewardPool, score_rollouts
from rlx.spec import RewardsSpec
from rlx.step import TokenStreams, assign_credit, join_row_rewards

COUNTDOWN = Path(__file__).parents[2] / "experiments" / "countdown.yaml"
REWARDS = {
    "turn": {
        "asked": {"plugin": "length.overlong", "turn": "query", "limit": 8, "buffer": 7},
        "said": {"plugin": "length.overlong", "turn": "answer", "limit": 8, "buffer": 7},
    },
    "global": {"right": {"plugin": "countdown.verify"}},
}
LEARNER = "loss.old_logprobs=learner"
POLICY_ONLY = {"mask": ["mask={strategy: effective}"], "spans": ["mask={strategy: turn_spans}"]}
WHOLE = {
    "all": ["mask={strategy: all_response}", LEARNER],
    "off": ["mask={strategy: effective, state_masking: false}", LEARNER],
}
TURNS = ["multiturn_grpo", "mt_grpo", "gigpo", "{name: grpo, enable_multiturn_advantage: true}"]


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=1, memory_mb=512) as opened:
        yield opened


def trees(task):
    """Two prompts with three rollouts each, of one to three turns."""
    asked = [("query", "who", {}, " you"), ("query", "where is", {}, " here")]
    return [
        conversation(
            [*asked, ("answer", "me", {}, None)],
            [asked[0], ("answer", "nobody", {}, None)],
            [("answer", "x", {}, None)],
            problem=task.problem("train", number, 0),
        )
        for number in range(2)
    ]


@dataclass
class Record:
    """A step whose credit was given as in a run, written down and read again."""

    stored: StoredStep
    setup: PhaseSetup
    batch: TokenBatch
    budget: dict[str, int]
    pool: RewardPool

    def check(self):
        tallies = {name: IdentityTally(name, *about) for name, about in IDENTITIES.items()}
        statistics = {"beta": 0.0, "state_before": {}, "max_tokens": self.budget}
        check_step(1, self.stored, self.setup, statistics, self.pool, tallies)
        return tallies

    def change(self, name, at, value):
        """Changes a token's value, and returns the first violations."""
        tensor = self.stored.rows.tokens[name].clone()
        tensor[at] = value
        rows = replace(self.stored.rows, tokens={**self.stored.rows.tokens, name: tensor})
        self.stored = replace(self.stored, rows=rows)
        return {name: tally.first[0] for name, tally in self.check().items() if tally.violated}


def recorded(pool, *overrides, estimator="multiturn_grpo"):
    named = estimator if estimator.startswith("{") else f"{{name: {estimator}}}"
    read, _ = check_file(COUNTDOWN, [*overrides, f"estimator={named}"])
    spec = read.spec.model_copy(update={"rewards": RewardsSpec.model_validate(REWARDS)})
    setup = build_setup(spec)
    grown = trees(setup.task)
    table = score_rollouts(grown, setup.rewards, pool)
    batch = build_token_batch(grown)
    budget = {"answer": 8, "query": 8}
    train = assign_credit(
        join_row_rewards(batch, grown, table, setup.mask(batch)),
        TokenStreams(
            old_logprobs=batch.behaviour_logprobs,
            optional={"reference_logprobs": batch.behaviour_logprobs - 0.25},
        ),
        CreditRules(
            estimator=setup.estimator, credit=spec.credit, loss=spec.loss, max_tokens=budget
        ),
    )
    stored = read_step(rollout_table(grown, table, TrainedRows.from_batch(train)))
    return Record(stored, setup, batch, budget, pool)


@each_row("estimator", TURNS)
def test_a_sound_record_holds_under_every_estimator_of_turns(estimator, pool):
    tallies = recorded(pool, *POLICY_ONLY["mask"], estimator=estimator).check()
    assert [tally.first for tally in tallies.values() if tally.violated] == []
    assert tallies["scores"].checked == 2 * (3 + 2 + 1) + 2 * 3


@each_row("mask", [*POLICY_ONLY, *WHOLE])
def test_observations_stay_out_or_follow_the_attention_mask(mask, pool):
    record = recorded(pool, *{**POLICY_ONLY, **WHOLE}[mask], estimator="grpo")
    assert [tally.first for tally in record.check().values() if tally.violated] == []
    observed = record.batch.is_environment
    for name in ("weights", "advantages", "kl"):
        assert record.stored.rows.tokens[name][observed].any() == (mask in WHOLE)


@each_row("name", ["mask", "weights", "advantages", "kl"])
def test_an_observation_that_carries_anything_is_found(name, pool):
    sound = recorded(pool, *POLICY_ONLY["mask"])
    at = tuple(sound.batch.is_environment.nonzero()[0].tolist())
    value = True if name == "mask" else 0.5
    first = sound.change(name, at, value)["masks" if name == "mask" else name]
    assert (first.what, first.row, first.token) == (name, *at)
    assert (first.stored, first.expected) == (value, 0)


def test_a_reward_where_no_such_turn_is_is_found(pool):
    sound = recorded(pool, *POLICY_ONLY["mask"])
    rewards, (tree,) = sound.stored.rewards, sound.stored.trees[:1]
    query = next(i for i, s in enumerate(tree.segments) if s.kind == "query")
    answer = next(i for i in tree.rollouts)
    said = rewards.turns[0, answer]["said"]
    right = rewards.rollouts[0, answer]["right"]
    for name, entry in (("said", said), ("right", right)):
        turns = {**rewards.turns, (0, query): {**rewards.turns[0, query], name: entry}}
        sound.stored = replace(sound.stored, rewards=replace(rewards, turns=turns))
        (first,) = sound.check()["scores"].first
        assert (first.tree, first.turn, first.what) == (0, 1, f"reward {name}")
        assert (first.stored, first.expected) == (entry.raw, "nothing")
