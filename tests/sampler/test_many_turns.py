"""A model and an environment taking turns: caches kept change nothing."""

import os
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from babblers import WAYS, babbler, sampled

from rlx.plugin import Environment, Problem, Step
from rlx.rollout import LocalHost, build_rollout_plan, sample_rollout_trees
from rlx.sampler import TransformersSampler, shared_attention
from rlx.spec import EnvironmentRolloutSpec

DEVICE = torch.device(os.environ.get("RLX_TEST_DEVICE", "cpu"))


class Counting(Environment):
    """Says how long the turn was; short ones end the rollout."""

    kinds: ClassVar[tuple[str, ...]] = ("say",)

    def reset(self, problem, seed):
        return 0

    def step(self, state, action):
        said = len(action.text)
        return Step(kind="say", state=state + 1, observation=f"{said}?\n", done=said % 5 == 0)


@pytest.fixture(scope="module", params=WAYS)
def policy(request):
    with sampled(babbler(0), request.param) as policy:
        yield policy


class Forgetful:
    """A session that keeps no cache: every context is read anew."""

    def __init__(self, session):
        self.session, self.context_length = session, session.context_length

    def generate(self, requests, sampling):
        return self.session.generate([replace(r, extends=None) for r in requests], sampling)


def grown(policy, *, wrap=lambda session: session, **options):
    spec = EnvironmentRolloutSpec.model_validate(
        {
            "environment": {"plugin": "counting"},
            "num_generations": 3,
            "max_turns": 5,
            "turn": {"max_new_tokens": 12},
            "forced_answer": {"template": "!"},
            **options,
        }
    )
    problems = [
        Problem(id=f"{n}", prompt=f"nums: {' '.join(map(str, range(2, 4 + n)))}\n", fields={})
        for n in range(6)
    ]
    sampler = TransformersSampler(policy, max_rows=512, device=DEVICE)
    with sampler.session() as session:
        seeds = range(100, 106)
        host = LocalHost(Counting())
        return sample_rollout_trees(
            build_rollout_plan(spec), problems, seeds, wrap(session), policy.dialogue, host
        )


@pytest.fixture(scope="module", params=["message", "inline"])
def observation(request):
    return request.param


@pytest.fixture(scope="module")
def trees(policy, observation):
    return grown(policy, observation=observation)


def same(one, other):
    """Whether trees are the same, log-probabilities to rounding."""
    for tree, again in zip(one, other, strict=True):
        for a, b in zip(tree.segments, again.segments, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
            assert replace(a, logprobs=b.logprobs) == b
    return True


def test_there_is_something_to_see(trees):
    lengths = {len(tree.turns(end)) for tree in trees for end in tree.rollouts}
    assert {1, 6} <= lengths and len(lengths) > 3
    reasons = {tree.segments[s].finish_reason for tree in trees for s in tree.policy_segments}
    assert reasons == {"stop", "length"}


def test_caches_are_kept_and_change_nothing(policy, trees, observation):
    assert same(trees, grown(policy, wrap=Forgetful, observation=observation))


def test_nor_does_reading_in_slices(policy, trees, observation, monkeypatch):
    monkeypatch.setattr(shared_attention, "SCORES", 1)
    assert same(trees, grown(policy, observation=observation))
