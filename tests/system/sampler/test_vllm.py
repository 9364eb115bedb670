"""vLLM against plain forwards and `generate`, after its weights have been replaced."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from babblers import ANSWER, CONFIDENCE, SPEC, babbler, furthest, second_turns
from engines import has_ended, kill_workers, needs_vllm, workers
from patience import wait_until
from transformers import MixtralConfig, MixtralForCausalLM

from rlx.errors import RlxError, SpecError
from rlx.rollout import CompletionRequest
from rlx.sampler import VllmSampler, open_sampler
from rlx.spec import RunnerSpec, TurnSpec
from rlx.spec import VllmSamplerSpec as VllmSpec

pytestmark = needs_vllm

CPU = torch.device("cpu")
ENGINE = VllmSpec(engine="vllm", max_rows=64, kv_cache_mb=32)


def opened(policy):
    return open_sampler(policy, ENGINE, RunnerSpec(), CPU)


@pytest.fixture(scope="module")
def policy():
    """The weights that are loaded over others."""
    return babbler(2)


@pytest.fixture(scope="module")
def sampler(policy):
    """An engine that has sampled with other weights before, from the very contexts of the tests."""
    with opened(babbler(1)) as sampler:
        sample(sampler, contexts_of(policy))
        sampler.load(dict(policy.model.named_parameters()))
        yield sampler


def contexts_of(policy):
    """Prompts of many lengths, some longer than a block of the prefix cache."""
    return [
        CompletionRequest(
            policy.dialogue.open(f"nums: {' '.join(map(str, range(2, 4 + 6 * n)))}\ntarget: {n}\n"),
            None,
            tuple(range(10 * n, 10 * n + 3)),
        )
        for n in range(7)
    ]


@pytest.fixture(scope="module")
def requests(policy):
    return contexts_of(policy)


def sample(sampler, requests, sampling=ANSWER):
    with sampler.session() as session:
        return session.generate(requests, sampling)


@pytest.fixture(scope="module")
def two_turns(sampler, policy, requests):
    with sampler.session() as session:
        first = session.generate(requests, ANSWER)
        below = second_turns(policy, requests, first)
        return first, below, session.generate(below, CONFIDENCE)


def tokens(completions):
    return [[(c.token_ids, c.finish_reason) for c in group] for group in completions]


@pytest.mark.parametrize(("turn", "temperature"), [(1, 1.0), (2, 0.7)])
def test_logprobs_are_those_of_a_plain_forward(policy, requests, two_turns, turn, temperature):
    first, below, second = two_turns
    asked, given = (requests, first) if turn == 1 else (below, second)
    assert furthest(policy, asked, given, temperature) <= 5e-5


def mixture(seed):
    """A mixture of experts, whose embeddings are not tied."""
    policy = babbler(seed)
    config = MixtralConfig(
        vocab_size=policy.model.vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        max_position_embeddings=SPEC.max_position,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return replace(policy, model=MixtralForCausalLM(config).eval())


def test_untied_weights_and_experts_arrive(requests):
    source = mixture(4)
    with opened(mixture(3)) as sampler:
        sample(sampler, requests)
        sampler.load(source.model.state_dict())
        assert furthest(source, requests, sample(sampler, requests)) <= 5e-5


def test_the_most_likely_tokens_are_those_of_generate(policy, sampler, requests):
    asked = [CompletionRequest(r.context, None, (5,)) for r in requests]
    ours = sample(sampler, asked, TurnSpec(top_k=1, max_new_tokens=48))
    for request, (completion,) in zip(asked, ours, strict=True):
        ids = torch.tensor([request.context])
        theirs = policy.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=48,
            eos_token_id=list(policy.end_ids),
            pad_token_id=0,
        )
        assert completion.token_ids == tuple(theirs[0, ids.shape[1] :].tolist())
        assert set(completion.logprobs) == {0.0}


def test_logprobs_are_those_of_the_cut_distribution(policy, sampler, requests):
    sampling = TurnSpec(max_new_tokens=6, top_k=4, top_p=0.9, temperature=0.7)
    from rlx.sampler.draw import compute_sampling_logprobs

    for request, group in zip(requests, sample(sampler, requests, sampling), strict=True):
        for c in group:
            ids = torch.tensor([request.context + c.token_ids])
            with torch.no_grad():
                logits = policy.model(input_ids=ids).logits[0, len(request.context) - 1 : -1]
            cut = compute_sampling_logprobs(logits, sampling)
            plain = cut[torch.arange(len(c.token_ids)), torch.tensor(c.token_ids)]
            assert c.logprobs == pytest.approx(plain.tolist(), abs=5e-5)


def test_a_turn_ends_with_the_first_stop_string(policy, sampler, requests, two_turns):
    read = policy.dialogue.read
    free = [c for group in two_turns[0] for c in group]
    stop = read(max(free, key=lambda c: len(c.token_ids)).token_ids)[0][9:11]
    turn = TurnSpec(max_new_tokens=24, stop=("never said", stop))
    stopped = [c for group in sample(sampler, requests, turn) for c in group]
    hit = [stop in read(c.token_ids)[0] for c in free]
    assert 0 < sum(hit) < len(hit)
    for was_hit, completion, whole in zip(hit, stopped, free, strict=True):
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        if was_hit:
            assert completion.finish_reason == "stop"
            assert stop in read(completion.token_ids)[0]
            assert stop not in read(completion.token_ids[:-1])[0]
        else:
            assert tokens([[completion]]) == tokens([[whole]])


def test_what_vllm_cannot_do_is_refused(policy, sampler, requests, monkeypatch):
    room = TurnSpec(max_new_tokens=SPEC.max_position - len(requests[0].context) + 1)
    with pytest.raises(SpecError, match=f"limit of {SPEC.max_position}: lower max_new_tokens"):
        sample(sampler, requests[:1], room)
    with monkeypatch.context() as patched:
        patched.setattr(sampler, "limits", (SPEC.max_position, 100))
        with pytest.raises(SpecError, match=r"vLLM's memory for 100: .*kv_cache_mb"):
            sample(sampler, requests[:1], room)
    with pytest.raises(SpecError, match="vLLM's minimum"):
        sample(sampler, requests, TurnSpec(temperature=0.005))


def test_a_killed_worker_is_started_again_with_the_same_weights(sampler, requests, two_turns):
    before = sampler.restarts
    assert kill_workers() == 1
    assert tokens(sample(sampler, requests)) == tokens(two_turns[0])
    assert sampler.restarts == before + 1


def test_a_worker_that_cannot_take_weights_says_so_and_is_gone():
    before, policy = workers(), babbler(0)
    policy.model.config.num_attention_heads = 3  # of no use to anyone
    with pytest.raises(RlxError, match="vLLM could not take the learner's weights: "):
        VllmSampler(policy, ENGINE, RunnerSpec(), CPU)
    assert workers() == before


def test_a_worker_that_cannot_start_is_no_riddle(monkeypatch):
    monkeypatch.setattr("rlx.sampler.vllm_engine.WORKER", "rlx.sampler.no_such_worker")
    with pytest.raises(RlxError, match="exit code 1 before it could start; its last output"):
        VllmSampler(babbler(0), ENGINE, RunnerSpec(), CPU)


HOLDER = """
import sys, time, torch
from rlx.model import build_policy
from rlx.sampler import open_sampler
from rlx.spec import RunnerSpec, TinyModelSpec, VllmSamplerSpec
spec = TinyModelSpec(hidden_size=64, heads=2, kv_heads=1, layers=2, intermediate_size=64)
engine = VllmSamplerSpec(engine="vllm", kv_cache_mb=32)
with open_sampler(build_policy(spec, 0), engine, RunnerSpec(), torch.device("cpu")):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_worker_does_not_outlive_its_rank():
    rank = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert rank.stdout.readline() == "ready\n"
    (worker,) = workers(rank.pid)
    here, shared = map(Path, worker.cmdline()[-2:])
    assert here.is_dir()
    assert shared.parent == Path("/dev/shm")
    rank.kill()
    rank.communicate()
    wait_until("the worker to end", lambda: has_ended(worker))
    assert not here.exists()
    assert not shared.exists()
