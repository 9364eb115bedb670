"""The sampler against plain forwards, `generate`, and itself in other company."""

import os
from dataclasses import replace

import pytest
import torch
from babblers import ANSWER, CONFIDENCE, SPEC, WAYS, babbler, furthest, sampled, second_turns
from rows import each_row

from rlx.errors import DivergedModelError, SpecError
from rlx.rollout import CompletionRequest
from rlx.sampler import TransformersSampler
from rlx.sampler.transformers_engine import LOOK_EVERY
from rlx.spec import TurnSpec

DEVICE = torch.device(os.environ.get("RLX_TEST_DEVICE", "cpu"))


@pytest.fixture(scope="module", params=WAYS)
def policy(request):
    with sampled(babbler(0), request.param) as policy:
        assert sampler(policy).description.startswith(request.param)
        yield policy


@pytest.fixture(scope="module")
def contexts(policy):
    """Prompts of many lengths."""
    return [
        policy.dialogue.open(f"nums: {' '.join(map(str, range(2, 4 + n)))}\ntarget: {n}\n")
        for n in range(7)
    ]


@pytest.fixture(scope="module")
def requests(contexts):
    return [
        CompletionRequest(context, None, tuple(range(10 * n, 10 * n + 3)))
        for n, context in enumerate(contexts)
    ]


def sampler(policy, max_rows=512):
    return TransformersSampler(policy, max_rows=max_rows, device=DEVICE)


def sample(policy, requests, sampling=ANSWER, max_rows=512):
    with sampler(policy, max_rows).session() as session:
        return session.generate(requests, sampling)


@pytest.fixture(scope="module")
def two_turns(policy, requests):
    with sampler(policy).session() as session:
        first = session.generate(requests, ANSWER)
        below = second_turns(policy, requests, first)
        return first, below, session.generate(below, CONFIDENCE)


def assert_agrees(one, other):
    """Equal tokens and ends; log-probabilities equal to rounding."""
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_the_sample_covers_what_the_tests_are_about(two_turns):
    first, _, second = two_turns
    for completions in (first, second):
        flat = [c for group in completions for c in group]
        assert {c.finish_reason for c in flat} == {"stop", "length"}
        assert len({len(c.token_ids) for c in flat}) > 3
        assert len({c.token_ids for c in flat}) > len(flat) / 2


@each_row(("turn", "temperature"), [(1, 1.0), (2, 0.7)])
def test_logprobs_are_those_of_a_plain_forward(policy, requests, two_turns, turn, temperature):
    first, below, second = two_turns
    asked, given = (requests, first) if turn == 1 else (below, second)
    assert furthest(policy, asked, given, temperature) <= 5e-5


def test_logprobs_are_those_of_the_cut_distribution(policy, requests):
    sampling = TurnSpec(max_new_tokens=6, top_k=4, top_p=0.9, temperature=0.7)
    for group in sample(policy, requests, sampling):
        for completion in group:
            assert all(-20 < p <= 0 for p in completion.logprobs)
    for group in sample(policy, requests, TurnSpec(max_new_tokens=6, top_k=1)):
        assert {p for c in group for p in c.logprobs} == {0.0}


def test_the_most_likely_tokens_are_those_of_generate(policy, contexts):
    ours = sample(policy, [CompletionRequest(c, None, (5,)) for c in contexts], TurnSpec(top_k=1))
    for context, (completion,) in zip(contexts, ours, strict=True):
        ids = torch.tensor([context], device=policy.model.device)
        theirs = policy.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=256,
            eos_token_id=list(policy.end_ids),
            pad_token_id=0,
        )
        assert completion.token_ids == tuple(theirs[0, len(context) :].tolist())


def test_log_probabilities_of_given_tokens_are_those_of_a_plain_forward(monkeypatch):
    policy = babbler(0)
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    monkeypatch.setattr("rlx.sampler.transformers_engine.MOST_LOGITS", 30 * vocabulary)
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(60, (n,), generator=draw).tolist() for n in (9, 1, 31, 4, 12, 12)]
    engine = sampler(policy)
    for ids, found in zip(sequences, engine.compute_logprobs(sequences, 3), strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([ids], device=DEVICE)).logits[0, :-1]
        plain = logits.log_softmax(-1)
        expected = [float(row[token]) for row, token in zip(plain, ids[1:], strict=True)]
        assert found.logprobs == pytest.approx(expected, abs=5e-5)
        best = [value for at in found.likeliest for _, value in at]
        assert best == pytest.approx(plain.topk(3).values.flatten().tolist(), abs=5e-5)
        assert len(found.likeliest) == len(ids) - 1
    with pytest.raises(SpecError, match="do not fit into this engine's limit"):
        engine.compute_logprobs([[5] * (policy.context_length + 1)], 0)


def test_what_all_contexts_begin_with_is_read_once(policy, monkeypatch):
    """The last context is what all begin with; of it, too, one token is read with the others."""
    opening = policy.dialogue.open("nums: 2 3 4 5 6 7 8 9 2 3 4 5 6 7 8 9\n")
    ends = [policy.dialogue.encode(f"target: {n}{n}\n") for n in range(3, 8)]
    contexts = [*((*opening, *end[: 3 + n]) for n, end in enumerate(ends)), tuple(opening)]
    requests = [CompletionRequest(c, None, (7 * n, 7 * n + 1)) for n, c in enumerate(contexts)]
    alone = [sample(policy, [request])[0] for request in requests]
    engine, counts = sampler(policy), []
    kind = type(engine._build_decoder().start(1))
    prefill = kind.prefill

    def note(rows, fresh, room):
        counts.append([len(tokens) for tokens in fresh])
        return prefill(rows, fresh, room)

    monkeypatch.setattr(kind, "prefill", note)
    with engine.session() as session:
        assert_agrees(session.generate(requests, ANSWER), alone)
    common = len(opening) - 1
    assert counts[:2] == [[common], [len(context) - common for context in contexts]]


def test_what_nobody_waits_for_ends(policy, requests, two_turns):
    """At the next look for finished rows: the others are sampled on."""
    asked = [replace(r, is_abandoned=lambda n=n: n == 1) for n, r in enumerate(requests[:3])]
    ends = [*map(len, (c.token_ids for c in two_turns[0][1]))]
    first, gone, third = sample(policy, asked)
    assert_agrees([first, third], [two_turns[0][0], two_turns[0][2]])
    for one, other, end in zip(gone, two_turns[0][1], ends, strict=True):
        assert one.token_ids == other.token_ids[: min(end, LOOK_EVERY)]


def test_whoever_asks_is_told_of_every_ended_completion(policy, requests, two_turns):
    told = []
    engine = sampler(policy)
    engine.on_ended = told.append
    with engine.session() as session:
        session.generate(requests, ANSWER)
    assert sum(told) == sum(len(request.seeds) for request in requests)
    assert len(told) > 1, "while others go on"


def test_a_limit_of_its_own_ends_a_completion(policy, requests, two_turns):
    limits = [1, 5, 40]
    own = [replace(r, max_new_tokens=n) for r, n in zip(requests[:3], limits, strict=True)]
    with sampler(policy).session() as session:
        limited = session.generate(own, ANSWER)
        below = second_turns(policy, own, limited)
        seconds = session.generate(below, CONFIDENCE)
        anew = session.generate([replace(r, extends=None) for r in below], CONFIDENCE)
    for short, long, limit in zip(limited, two_turns[0][:3], limits, strict=True):
        for one, other in zip(short, long, strict=True):
            assert one.token_ids == other.token_ids[:limit]
            assert one.logprobs == pytest.approx(other.logprobs[:limit], abs=1e-5)
            cut = len(other.token_ids) > limit
            assert one.finish_reason == ("length" if cut else other.finish_reason)
    assert_agrees(seconds, anew)


@each_row("max_rows", [1, 3, 7])
def test_the_size_of_batches_does_not_matter(policy, requests, two_turns, max_rows):
    first, below, second = two_turns
    with sampler(policy, max_rows).session() as session:
        assert_agrees(session.generate(requests, ANSWER), first)
        assert_agrees(session.generate(below, CONFIDENCE), second)


def test_nor_does_how_many_completions_a_context_gets(policy, contexts):
    counts = [1, 4, 0, 2, 1, 7, 3]
    asked = [
        CompletionRequest(context, None, tuple(range(10 * n, 10 * n + count)))
        for n, (context, count) in enumerate(zip(contexts, counts, strict=True))
    ]
    one_by_one = [
        CompletionRequest(request.context, None, (seed,))
        for request in asked
        for seed in request.seeds
    ]
    with sampler(policy).session() as session:
        together = session.generate(asked, ANSWER)
        flat = [(c,) for group in together for c in group]
        assert [len(group) for group in together] == counts
        assert_agrees(session.generate(one_by_one, ANSWER), flat)
        below = second_turns(policy, one_by_one, flat)
        mixed = [replace(r, seeds=r.seeds[: 1 + n % 2]) for n, r in enumerate(below)]
        seconds = session.generate(mixed, CONFIDENCE)
    anew = [replace(request, extends=None) for request in mixed]
    assert_agrees(seconds, sample(policy, anew, CONFIDENCE))


def test_completions_are_continued_in_any_order_and_number_beside_new_contexts(
    policy, requests, two_turns
):
    _, below, second = two_turns
    chosen = [13, 2, 2, 20, 7]
    below = [*below[:20], replace(below[20], extends=None)]
    with sampler(policy, max_rows=5).session() as session:
        session.generate(requests, ANSWER)
        found = session.generate([below[i] for i in chosen], CONFIDENCE)
    assert_agrees(found, [second[i] for i in chosen])


def test_a_turn_ends_with_its_end_token_or_its_budget(policy, two_turns):
    ends = set(policy.end_ids)
    for group in two_turns[0]:
        for c in group:
            assert ends.isdisjoint(c.token_ids[:-1])
            assert (c.finish_reason == "stop") == (c.token_ids[-1] in ends)
            assert c.finish_reason == "stop" or len(c.token_ids) == ANSWER.max_new_tokens
            assert len(c.token_ids) == len(c.logprobs)


def test_a_turn_ends_with_the_first_stop_string(policy, requests, two_turns):
    read = policy.dialogue.read
    free = [c for group in two_turns[0] for c in group]
    stop = read(max(free, key=lambda c: len(c.token_ids)).token_ids)[0][9:11]
    turn = TurnSpec(max_new_tokens=24, stop=("never said", stop))
    stopped = [c for group in sample(policy, requests, turn) for c in group]
    hit = [stop in read(c.token_ids)[0] for c in free]
    assert 0 < sum(hit) < len(hit)
    for was_hit, completion, whole in zip(hit, stopped, free, strict=True):
        said = len(completion.token_ids)
        assert completion.token_ids == whole.token_ids[:said]
        if not was_hit:
            assert_agrees([[completion]], [[whole]])
            continue
        assert completion.finish_reason == "stop"
        assert stop in read(completion.token_ids)[0]
        assert stop not in read(completion.token_ids[:-1])[0]


def test_a_dialogue_that_could_outgrow_the_model_is_refused(policy, contexts):
    room = TurnSpec(max_new_tokens=SPEC.max_position - len(contexts[0]) + 1)
    with pytest.raises(SpecError, match=f"limit of {SPEC.max_position}: lower max_new_tokens"):
        sample(policy, [CompletionRequest(contexts[0], None, (1,))], room)


@each_row("way", WAYS)
def test_logits_that_are_no_numbers_are_named(way):
    with sampled(babbler(0), way) as policy:
        prompt = policy.dialogue.open("nums: 2 3\ntarget: 5\n")
        with torch.no_grad():
            policy.model.lm_head.weight.fill_(torch.nan)
        with pytest.raises(DivergedModelError, match=r"logits are NaN.*learning_rate"):
            sample(policy, [CompletionRequest(prompt, None, (0, 1))])


def test_what_no_later_turn_extends_is_not_kept(policy, requests):
    with sampler(policy).session() as session:
        first = session.generate(requests, ANSWER)
        below = second_turns(policy, requests, first)
        kept = [replace(request, is_last=True) for request in below]
        assert len(session._kept) == sum(map(len, first))
        last = session.generate(kept, CONFIDENCE)
        assert session._kept == []
    with sampler(policy).session() as session:
        session.generate(requests, ANSWER)
        assert session.generate(below, CONFIDENCE) == last
