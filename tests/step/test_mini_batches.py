"""Parts of a batch with one optimizer step each: whole prompts, each with its own average."""

from dataclasses import replace

import torch
from rows import each_row
from token_trees import prompt, turn

from rlx.batch import build_token_batch
from rlx.credit import CreditInputs
from rlx.phase_setup import CreditRules
from rlx.plugin import Problem
from rlx.rollout import NO_PARENT, RolloutTree
from rlx.spec import CreditSpec, LossSpec
from rlx.step import ScoredRows, TokenStreams, assign_credit, split_mini_batches

LENGTHS = {"p": (3, 1), "q": (2, 2), "r": (1, 4), "s": (2,), "t": (5, 1)}
"""Tokens of the answers to each prompt."""
MAX_TOKENS = {"answer": 5}


def grow(names):
    trees = []
    for name in names:
        segments = prompt(NO_PARENT, 1), *(turn(0, *(2,) * n) for n in LENGTHS[name])
        trees.append(RolloutTree(Problem(id=name, prompt="?", fields={}), segments))
    return trees


def by_length(inputs: CreditInputs) -> torch.Tensor:
    """An advantage that depends on nothing but the row itself."""
    return inputs.mask * inputs.mask.sum(dim=1, keepdim=True).float()


def step(names, loss):
    batch = build_token_batch(grow(names))
    rows = len(batch.rows)
    return assign_credit(
        ScoredRows.join(
            batch,
            batch.is_own,
            turn_rewards=torch.ones(rows, 1),
            turn_present=torch.ones(rows, 1, dtype=torch.bool),
            global_rewards=torch.zeros(rows),
        ),
        TokenStreams(old_logprobs=batch.behaviour_logprobs - 0.5),
        CreditRules(estimator=by_length, credit=CreditSpec(), loss=loss, max_tokens=MAX_TOKENS),
    )


def split(train, parts, loss):
    rules = CreditRules(estimator=by_length, credit=CreditSpec(), loss=loss, max_tokens=MAX_TOKENS)
    return split_mini_batches(train, parts, rules)


LOSSES = [
    LossSpec(aggregate="token_mean"),
    LossSpec(aggregate="sequence_mean"),
    LossSpec(aggregate="constant"),
    LossSpec.model_validate({"entropy": {"coefficient": 0.1}}),
    LossSpec.model_validate(
        {"old_logprobs": "learner", "correction": {"kind": "truncate", "level": "token", "cap": 2}}
    ),
]


@each_row("loss", LOSSES, ids=str)
@each_row(
    ("parts", "names"),
    [(2, ["pqr", "st"]), (3, ["pq", "rs", "t"]), (5, ["p", "q", "r", "s", "t"])],
)
def test_a_part_is_what_its_prompts_alone_would_be(loss, parts, names):
    """Its loss is that of a step of these prompts; only advantages come from the whole step."""
    whole = step("pqrst", loss)
    made = split(whole, parts, loss)
    assert len(made) == parts
    for part, own in zip(made, names, strict=True):
        alone, rows = step(own, loss), part.mask.any(dim=1)
        for name in ("weights", "entropy_weights", "advantages", "wanted"):
            ours = getattr(part, name)[rows][:, : alone.mask.shape[1]]
            torch.testing.assert_close(ours, getattr(alone, name), msg=name)
        assert not part.weights[~rows].any() and not part.wanted[~rows].any()


def test_every_learning_token_is_in_one_part():
    whole = step("pqrst", LOSSES[0])
    made = split(whole, 3, LOSSES[0])
    assert torch.equal(sum(part.mask.int() for part in made), whole.mask.int())
    assert torch.equal(sum(part.wanted.int() for part in made), whole.wanted.int())
    assert all(part.advantages is whole.advantages for part in made)


def test_one_part_is_the_batch_itself():
    whole = step("pq", LOSSES[0])
    assert split(whole, 1, LOSSES[0]) == [whole]


def test_a_step_that_lost_prompts_has_fewer_parts():
    whole = step("pq", LOSSES[0])
    assert len(split(whole, 5, LOSSES[0])) == 2


def test_prompts_are_told_by_their_ids():
    """Rows of a prompt stay together wherever they stand."""
    whole = step("pq", LOSSES[0])
    order = torch.tensor([2, 0, 3, 1])
    moved = replace(
        whole,
        mask=whole.mask[order],
        wanted=whole.wanted[order],
        batch=replace(
            whole.batch,
            rows=tuple(whole.batch.rows[i] for i in order.tolist()),
            tree_ids=whole.batch.tree_ids[order],
            levels=whole.batch.levels[order],
        ),
    )
    for one, other in zip(split(whole, 2, LOSSES[0]), split(moved, 2, LOSSES[0]), strict=True):
        assert torch.equal(one.weights[order], other.weights)
