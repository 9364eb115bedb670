"""Structured rewards, masks, placement and KL of one multi-turn step (KG-R1)."""

import bound
import pytest
import torch
from rows import each_row
from token_trees import prompt, seen, turn

from rlx.batch import build_token_batch
from rlx.credit import Credit
from rlx.errors import PluginError, RlxError
from rlx.phase_setup import CreditRules
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, RolloutTree
from rlx.spec import CreditSpec, LossSpec
from rlx.step import ScoredRows, TokenStreams, assign_credit

# Two rollouts of a prompt of one token: two turns of 2 and 1 tokens with an observation of 2 tokens
# between them, and one turn of 3.
MULTI = RolloutTree(
    Problem(id="p", prompt="?", fields={}),
    (
        prompt(NO_PARENT, 1),
        turn(0, 5, 5),
        seen(1, 1, 1),
        turn(2, 5, number=2),
        turn(0, 5, 5, 5),
    ),
)
SINGLE = RolloutTree(
    Problem(id="p", prompt="?", fields={}),
    (prompt(NO_PARENT, 1), turn(0, 5, 5, 5), turn(0, 5, 5)),
)
REWARDS = {
    "turn_rewards": torch.tensor([[0.25, 0.1], [0.3, 0.0]]),
    "turn_present": torch.tensor([[True, True], [True, False]]),
    "global_rewards": torch.tensor([0.5, 0.0]),
}
ALONE = {
    "turn_rewards": torch.tensor([[0.25], [0.3]]),
    "turn_present": torch.tensor([[True], [True]]),
    "global_rewards": torch.tensor([0.5, 0.0]),
}


MODEL_TOKENS, GRPO = bound.mask("model_tokens"), bound.estimator("grpo")


def step(
    tree=MULTI,
    rewards=REWARDS,
    *,
    mask=MODEL_TOKENS,
    estimator=GRPO,
    streams=None,
    loss=None,
    **credit,
):
    batch = build_token_batch([tree])
    return assign_credit(
        ScoredRows.join(batch, mask(batch), **rewards),
        streams or TokenStreams(old_logprobs=batch.behaviour_logprobs),
        CreditRules(
            estimator=estimator,
            credit=CreditSpec(**credit),
            loss=LossSpec(**loss or {}),
            max_tokens={"answer": 3},
        ),
    )


#                prompt, turn 1 (2), information (2), turn 2 (1)
MODEL = [0, 1, 1, 0, 0, 1]
RESPONSE = [0, 1, 1, 1, 1, 1]


@each_row(("state_masking", "expected"), [(True, MODEL), (False, RESPONSE)])
def test_one_effective_mask_for_kl_gae_grpo_and_score(state_masking, expected):
    """The mask table of KG-R1."""
    ones, where = torch.ones(2, 6), torch.tensor(expected, dtype=torch.bool)
    optional = {"reference_logprobs": -2 * ones, "values": torch.zeros(2, 6)}
    for estimator in (GRPO, bound.estimator("gae", environment="literal")):
        train = step(
            mask=bound.mask("effective", state_masking=state_masking),
            estimator=estimator,
            streams=TokenStreams(old_logprobs=-ones, optional=optional, beta=0.1),
            use_kl_in_reward=True,
            placement="turn_proportional",
        )
        assert torch.equal(train.mask[0], where)
        assert torch.equal(train.kl[0], where.float())
        paid = train.placed.token_rewards - train.token_rewards
        assert torch.equal(paid[0] != 0, where)
        assert torch.equal(train.advantages[0] != 0, where)
        everywhere = train.returns[0][where].sum()
        assert train.scores.masked_return_sum[0] == pytest.approx(float(everywhere))


def test_states_are_told_apart_by_what_opened_the_turn_or_by_the_environments_word():
    def rollout(*words):
        segments = [prompt(NO_PARENT, 1)]
        for word in words:
            at = len(segments)
            segments += [turn(0, 5), seen(at, 1, 1, **word), turn(at + 1, 5, number=2)]
        return build_token_batch([RolloutTree(MULTI.problem, tuple(segments))]).state_ids.tolist()

    assert rollout({}, {}) == [[0, 1], [0, 1]]
    assert rollout({"state": "a"}, {"state": "b"}) == [[0, 1], [0, 2]]
    assert rollout({"state": "a"}, {}) == [[0, 1], [0, 2]]
    assert build_token_batch([MULTI]).state_ids.tolist() == [[0, 1], [0, -1]]


@each_row(
    ("credit", "sums"),
    [
        ({}, [0.675, 0.3]),
        ({"placement": "turn_proportional"}, [0.85, 0.3]),
        ({"placement": "turn_end"}, [0.85, 0.3]),
        ({"placement": "turn_end", "turn_reduce": "mean"}, [0.675, 0.3]),
    ],
)
def test_three_scores_of_each_row(credit, sums):
    train = step(**credit)
    assert train.scores.total_score.tolist() == pytest.approx([0.675, 0.3])
    assert train.scores.token_level_scores.tolist() == pytest.approx(sums)
    assert train.scores.masked_return_sum.tolist() == pytest.approx(
        train.advantages.sum(dim=1).tolist()
    )


def test_the_sources_score_grows_with_length():
    """γ = λ = 1: every token's return is what is still to come, so it is n · R."""
    streams = TokenStreams(old_logprobs=torch.zeros(2, 6), optional={"values": torch.randn(2, 6)})
    train = step(estimator=bound.estimator("gae"), streams=streams)
    assert train.scores.masked_return_sum.tolist() == pytest.approx([3 * 0.675, 3 * 0.3])


@each_row("use_kl_in_reward", [True, False])
def test_seed000_places_by_whether_kl_is_on(use_kl_in_reward):
    credit = CreditSpec(profile="seed000", use_kl_in_reward=use_kl_in_reward)
    expected = "turn_proportional" if use_kl_in_reward else "final_token_only"
    assert credit.resolved_placement.plugin == expected
    chosen = CreditSpec(profile="seed000", use_kl_in_reward=True, placement="turn_end")
    assert chosen.resolved_placement.plugin == "turn_end"


LOGPROBS = TokenStreams(
    old_logprobs=torch.tensor([[9.0, -1.0, -0.5, 9.0, 9.0, -0.3], [9.0, -0.7, -0.7, -0.7, 9, 9]]),
    optional={
        "reference_logprobs": torch.tensor(
            [[0, -1.2, -0.5, 0, 0, -0.1], [0, -0.9, -0.7, -0.7, 0, 0]]
        )
    },
    beta=0.5,
)


def test_without_a_coefficient_kl_is_measured_and_not_paid():
    free = TokenStreams(old_logprobs=LOGPROBS.old_logprobs, optional=LOGPROBS.optional)
    train = step(streams=free, use_kl_in_reward=True)
    assert train.kl.any() and torch.equal(train.token_rewards, train.placed.token_rewards)


def test_kl_is_paid_by_the_token():
    train = step(
        streams=LOGPROBS, estimator=bound.estimator("reinforce_plus_plus"), use_kl_in_reward=True
    )
    expected = torch.tensor([[0, 0.2, 0, 0, 0, -0.2], [0, 0.2, 0, 0, 0, 0]])
    torch.testing.assert_close(train.kl, expected)
    torch.testing.assert_close(train.token_rewards, train.placed.token_rewards - 0.5 * expected)
    assert train.scores.token_level_scores.tolist() == pytest.approx([0.675, 0.3])


def test_a_score_of_token_rewards_has_paid_it_and_a_structured_one_has_not():
    credit = {"use_kl_in_reward": True, "streams": LOGPROBS}
    centred = bound.estimator("grpo", normalize="center")
    structured = step(estimator=centred, **credit)
    paid = step(estimator=centred, score_source="token_rewards", **credit)
    half = (0.675 - 0.3) / 2
    assert structured.advantages[:, 1].tolist() == pytest.approx([half, -half])
    half = (0.675 - (0.3 - 0.1)) / 2
    assert paid.advantages[:, 1].tolist() == pytest.approx([half, -half])


def test_multi_turn_grpo_never_sees_it():
    plain = step(estimator=bound.estimator("multiturn_grpo"))
    beside = step(
        estimator=bound.estimator("multiturn_grpo"), streams=LOGPROBS, use_kl_in_reward=True
    )
    assert torch.equal(plain.advantages, beside.advantages)
    assert plain.kl is None and beside.kl is not None


def test_kl_is_measured_for_a_penalty_without_touching_the_reward():
    train = step(streams=LOGPROBS)
    assert torch.equal(train.token_rewards, train.placed.token_rewards)
    assert train.kl.any()


def learned(rewards=ALONE, **loss):
    return step(SINGLE, rewards, loss=loss)


def test_rows_without_signal_are_computed_only_where_a_penalty_pulls():
    equal = {
        "turn_rewards": torch.full((2, 1), 0.7),
        "turn_present": torch.ones(2, 1, dtype=torch.bool),
        "global_rewards": torch.zeros(2),
    }
    assert not learned(equal).wanted.any()
    assert not learned(equal, ratio="sequence").wanted.any()
    pulled = learned(equal, kl={"coefficient": 0.1})
    assert torch.equal(pulled.wanted, pulled.mask)
    assert torch.equal(learned().wanted, learned().mask)


def test_an_entropy_bonus_on_everything_that_learns():
    train = learned(entropy={"coefficient": 0.5})
    assert train.entropy_weights.sum().item() == pytest.approx(0.5)
    assert torch.equal(train.entropy_weights > 0, train.mask)


@each_row(
    ("estimator", "complaint"),
    [
        (lambda x: x.global_rewards, r"shape \(2,\), not \[B, T\]"),
        (lambda x: "much", "shape str"),
        (
            lambda x: torch.where(x.mask, torch.nan, 0.0),
            "returned nan in its advantages for token 1",
        ),
        (lambda x: torch.ones(x.mask.shape), "for token 0 of row 0, which is outside the mask"),
        (
            lambda x: Credit(
                advantages=bound.estimator("grpo")(x), returns=torch.full(x.mask.shape, torch.inf)
            ),
            "returned inf in its returns",
        ),
    ],
)
def test_what_an_estimator_gives_is_looked_at(estimator, complaint):
    with pytest.raises(PluginError, match=complaint):
        step(estimator=estimator)


def test_a_reference_that_knows_no_probability_is_found():
    broken = TokenStreams(
        old_logprobs=torch.zeros(2, 6),
        optional={"reference_logprobs": torch.full((2, 6), -torch.inf)},
    )
    with pytest.raises(RlxError, match="not finite"):
        step(streams=broken)
