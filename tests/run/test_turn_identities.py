"""What `rlx check` asks of many turns: sound records hold, and each identity can fail."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rows import each_row
from trees import conversation

from rlx.assignment import join_row_rewards
from rlx.batch import build_token_batch
from rlx.discovery import resolve_plugins
from rlx.phase_setup import build_setup
from rlx.plan import check_file
from rlx.record.rollouts import read_step, rollout_table
from rlx.results.identities import IDENTITIES, StepEvidence
from rlx.reward import RewardPool, score_rollouts
from rlx.rollout import RolloutTree
from rlx.run.streams import build_trained_rows
from rlx.spec import EnvironmentRolloutSpec, EnvironmentUse, RewardsSpec
from rlx.step import assign_credit
from rlx.train_batch import CreditRules, TokenStreams

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


def recorded(pool, *overrides, estimator="multiturn_grpo"):
    """The evidence of a step whose credit was given as in a run, written down and read again."""
    named = estimator if estimator.startswith("{") else f"{{name: {estimator}}}"
    read, _ = check_file(COUNTDOWN, [*overrides, f"estimator={named}"])
    spec = read.spec.model_copy(update={"rewards": RewardsSpec.model_validate(REWARDS)})
    setup, plugins = build_setup(spec), resolve_plugins(spec)
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
    return StepEvidence(
        step=1,
        stored=read_step(rollout_table(grown, table, build_trained_rows(train))),
        setup=setup,
        strategy=plugins.mask,
        estimator=plugins.estimator,
        statistics={"beta": 0.0, "state_before": {}, "max_tokens": budget},
        pool=pool,
    )


def found(evidence):
    return {identity.name: identity.check(evidence) for identity in IDENTITIES}


def broken(evidence):
    return {name: result.first[0] for name, result in found(evidence).items() if result.violated}


@each_row("estimator", TURNS)
def test_a_sound_record_holds_under_every_estimator_of_turns(estimator, pool):
    results = found(recorded(pool, *POLICY_ONLY["mask"], estimator=estimator))
    assert [result.first for result in results.values() if result.violated] == []
    assert results["turns"].checked == 2 * (3 + 2 + 1)
    assert results["rewarded"].checked == 2 * (3 + 2 + 1) + 2 * 3
    assert results["observations"].checked == 2 * (4 + 5 + 4)


@each_row("mask", [*POLICY_ONLY, *WHOLE])
def test_observations_stay_out_or_follow_the_attention_mask(mask, pool):
    evidence = recorded(pool, *{**POLICY_ONLY, **WHOLE}[mask], estimator="grpo")
    results = found(evidence)
    assert [result.first for result in results.values() if result.violated] == []
    assert (results["observations"].checked > 0) == (mask in POLICY_ONLY)
    observed = evidence.batch.is_environment
    for name in ("weights", "advantages", "kl"):
        assert evidence.get_token_stream(name)[observed].any() == (mask in WHOLE)


# Records that were changed ------------------------------------------------------------------------


def with_token(evidence, name, at, value):
    tensor = evidence.get_token_stream(name).clone()
    tensor[at] = value
    tokens = {**evidence.rows.tokens, name: tensor}
    rows = replace(evidence.rows, tokens=tokens)
    return replace(evidence, stored=replace(evidence.stored, rows=rows))


def observation(evidence):
    return tuple(evidence.batch.is_environment.nonzero()[0].tolist())


@each_row("name", ["mask", "weights", "advantages", "kl"])
def test_an_observation_that_carries_anything_is_found(name, pool):
    sound = recorded(pool, *POLICY_ONLY["mask"])
    at = observation(sound)
    value = True if name == "mask" else 0.5
    first = broken(with_token(sound, name, at, value))["observations"]
    assert (first.what, first.row, first.token) == (name, *at)
    assert (first.stored, first.expected) == (value, 0)


def test_an_observation_left_out_where_all_learns_is_found(pool):
    sound = recorded(pool, *WHOLE["off"], estimator="grpo")
    at = observation(sound)
    first = broken(with_token(sound, "mask", at, False))["masks"]
    assert (first.row, first.token, first.stored, first.expected) == (*at, False, True)


def test_an_answer_turn_without_an_advantage_of_its_own_is_found(pool):
    """The defect of the source: the tokens of the last turn had none."""
    sound = recorded(pool, *POLICY_ONLY["mask"])
    row = next(b for b, r in enumerate(sound.batch.rows) if len(r.turns) == 3)
    last = sound.batch.turn_ids[row] == 3
    where = torch.zeros_like(sound.mask)
    where[row] = last
    first = broken(with_token(sound, "advantages", where, 0.0))["advantages"]
    assert (first.row, first.turn, first.stored) == (row, 3, 0.0)
    assert first.expected != 0.0


@each_row("number", [1, 2, 5])
def test_a_last_turn_that_shares_an_id_or_skips_one_is_found(number, pool):
    sound = recorded(pool, *POLICY_ONLY["mask"])
    tree = sound.stored.trees[1]
    at = next(i for i, s in enumerate(tree.segments) if s.turn == 3)
    segments = list(tree.segments)
    segments[at] = replace(segments[at], turn=number)
    trees = (sound.stored.trees[0], RolloutTree(tree.problem, tuple(segments)))
    changed = replace(sound, stored=replace(sound.stored, trees=trees))
    by_name = {identity.name: identity for identity in IDENTITIES}
    result = by_name["turns"].check(changed)
    assert result.violated == 2  # one id has too many tokens, another has none
    assert {v.what for v in result.first} == {
        f"number of tokens with turn id {id_}" for id_ in (number, 3)
    }
    assert all(v.tree == 1 for v in result.first)


@each_row(("most", "forced", "violated"), [(3, None, 0), (2, {}, 0), (2, None, 2)])
def test_more_turns_than_are_allowed_are_found(most, forced, violated, pool):
    sound = recorded(pool, *POLICY_ONLY["mask"])
    rollout = EnvironmentRolloutSpec(
        environment=EnvironmentUse(plugin="any"), max_turns=most, forced_answer=forced
    )
    spec = sound.setup.spec.model_copy(update={"rollout": rollout})
    changed = replace(sound, setup=replace(sound.setup, spec=spec))
    by_name = {identity.name: identity for identity in IDENTITIES}
    result = by_name["turns"].check(changed)
    assert result.violated == violated
    assert all((v.stored, v.expected) == (3, 2) for v in result.first)


def test_a_reward_where_no_such_turn_is_is_found(pool):
    sound = recorded(pool, *POLICY_ONLY["mask"])
    rewards, (tree,) = sound.stored.rewards, sound.stored.trees[:1]
    query = next(i for i, s in enumerate(tree.segments) if s.kind == "query")
    answer = next(i for i in tree.rollouts)
    said = rewards.turns[0, answer]["said"]
    right = rewards.rollouts[0, answer]["right"]
    wrong = {
        "another kind": replace(rewards, turns={**rewards.turns, (0, query): {"said": said}}),
        "no whole rollout": replace(
            rewards, rollouts={**rewards.rollouts, (0, query): {"right": right}}
        ),
        "a turn": replace(rewards, turns={**rewards.turns, (0, query): {"right": right}}),
    }
    for what, changed in wrong.items():
        first = broken(replace(sound, stored=replace(sound.stored, rewards=changed)))["rewarded"]
        assert (first.tree, first.turn) == (0, 1), what
        assert first.stored == "given to a turn of kind query" and first.expected.startswith("for ")
