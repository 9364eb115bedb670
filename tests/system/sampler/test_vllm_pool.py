"""The pool of servers: who gets which rows and weights, and what happens when one ends.

Most of it is shown with servers that do not import vLLM; see tests/fake_vllm_server.py.
"""

import copy
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from babblers import ANSWER, babbler, furthest
from engines import has_ended, needs_vllm, workers
from patience import wait_until

from rlx.errors import EnvironmentFault, RlxError
from rlx.model import adapter_weights
from rlx.model.lora import adapt_model
from rlx.rollout import CompletionRequest
from rlx.sampler import (
    PoolSampler,
    load_weights,
    machine_pool,
    open_sampler,
    vllm_connection,
    vllm_pool,
    vllm_process,
)
from rlx.sampler.channel import Channel
from rlx.sampler.vllm_process import select_pool_gpus
from rlx.spec import Lora, RunnerSpec, SamplerPoolSpec, TurnSpec, VllmSamplerSpec

TESTS = Path(__file__).parents[2]
CPU = torch.device("cpu")
TURN = TurnSpec(max_new_tokens=4)


class Unconverted:
    """Weights that no model has."""

    def __init__(self, model):
        pass

    def convert(self, weights):
        return {"mark": weights["mark"]} if "mark" in weights else {"mark": torch.tensor(0)}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine whose servers are fakes, and the folder that its ranks share."""
    monkeypatch.setattr(vllm_process, "WORKER", "fake_vllm_server")
    monkeypatch.setattr(vllm_pool, "StoredForm", Unconverted)
    monkeypatch.setattr(vllm_pool, "require_vllm", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    yield monkeypatch
    assert not any(tmp_path.glob("rlx-vllm-*")), "a pool leaves nothing"
    assert not any(Path("/dev/shm").glob(f"{tmp_path.name}-rlx-vllm-*"))
    assert not fakes()


def fakes():
    """The servers that run."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended, or nobody has waited for it yet
            if "fake_vllm_server" in " ".join(process.cmdline()):
                found.append(process)
    return found


def opened(servers=2, *, repeatable=False, **settings):
    pool = {"servers": servers, "repeatable": repeatable}
    spec = VllmSamplerSpec(engine="vllm", pool=pool, **settings)
    policy = replace(babbler(0), lora=Lora(rank=4, alpha=8))
    return PoolSampler(policy, spec, RunnerSpec(), CPU)


def as_rank(monkeypatch, rank, ranks):
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


def mark(number):
    return {"mark": torch.tensor(number)}


def ask(sampler, seeds):
    """Seed, server and weights of each row."""
    rows = sampler.generate([((1, 2), seed) for seed in seeds], TURN)
    return [tuple(tokens) for tokens, *_ in rows]


# Rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 12])
def test_parts_are_equal_and_in_order(count):
    parts = vllm_pool.split_evenly(range(count), 3)
    assert [one for part in parts for one in part] == list(range(count))
    assert len(parts) == 3
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_all_ranks_ask_all_servers_each_in_its_own_order(machine):
    as_rank(machine, 0, 2)
    first = opened()
    as_rank(machine, 1, 2)
    second = opened()
    try:
        second.load(mark(7))  # only the first rank sends them
        first.load(mark(7))
        assert ask(first, range(5)) == [(0, 0, 7), (1, 0, 7), (2, 1, 7), (3, 1, 7), (4, 1, 7)]
        assert ask(second, range(5)) == [(0, 1, 7), (1, 1, 7), (2, 0, 7), (3, 0, 7), (4, 0, 7)]
        assert ask(first, []) == []
        assert ask(first, [9]) == [(9, 1, 7)]
        assert (first.limits[1], first.context_length) == (128, 128)
    finally:
        second.close()
        first.close()


def test_a_request_waits_for_the_weights_that_it_names(machine):
    as_rank(machine, 0, 2)
    first = opened()
    as_rank(machine, 1, 2)
    second = opened()
    answers = []
    try:
        second.load(mark(3))
        early = threading.Thread(target=lambda: answers.extend(ask(second, range(4))))
        early.start()
        first.load(mark(3))
        early.join()
        assert [weights for _, _, weights in answers] == [3] * 4
    finally:
        second.close()
        first.close()


def test_a_repeatable_server_answers_one_request_at_a_time(machine):
    as_rank(machine, 0, 2)
    first = opened(repeatable=True)
    as_rank(machine, 1, 2)
    second = opened(repeatable=True)
    answers = []

    def ask_often(sampler):
        for number in range(10):
            answers.extend(ask(sampler, [10 * number + n for n in range(4)]))

    try:
        second.load(mark(3))
        first.load(mark(3))
        asking = [threading.Thread(target=ask_often, args=(one,)) for one in (first, second)]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        assert len(answers) == 80
        assert first.restarts == 0, "a server that is asked twice at once ends"
    finally:
        second.close()
        first.close()


# Ends --------------------------------------------------------------------------------------------


def test_a_server_that_ends_is_replaced_and_asked_again(machine, tmp_path, capfd):
    machine.setenv("RLX_TEST_SERVER", f"dies={tmp_path / 'death'}:1")
    sampler = opened(servers=1)
    try:
        sampler.load(mark(5))
        assert ask(sampler, range(3)) == [(0, 0, 5), (1, 0, 5), (2, 0, 5)]
        assert sampler.restarts == 1
    finally:
        sampler.close()
    said = capfd.readouterr().err
    assert "vLLM server 0 has not answered 3 rows: they are asked again" in said
    assert 'was ended by SIGKILL (its last words: "the machine has no memory left")' in said
    assert "; starting another in its place" in said


def test_a_server_that_goes_on_ending_ends_the_run(machine, tmp_path):
    machine.setenv("RLX_TEST_SERVER", f"dies={tmp_path / 'death'}:99")
    sampler = opened(servers=1)
    try:
        with pytest.raises(RlxError) as caught:
            ask(sampler, range(3))
        said = str(caught.value)
        assert said.startswith("vLLM server 0, process ")
        assert 'ended by SIGKILL (its last words: "the machine has no memory left")' in said
        assert "it has ended 3 times since the last weights arrived" in said
        assert "sampler.max_rows" in said
        assert sampler.restarts == 2
        with pytest.raises(RlxError, match="it has ended 3 times"):
            sampler.load(mark(1))
    finally:
        sampler.close()


def test_every_rank_is_told_why_the_pool_has_ended(machine, tmp_path):
    machine.setenv("RLX_TEST_SERVER", f"dies={tmp_path / 'death'}:99")
    as_rank(machine, 0, 2)
    first = opened(servers=1)
    as_rank(machine, 1, 2)
    second = opened(servers=1)
    try:
        for sampler in (second, first):
            with pytest.raises(RlxError, match="it has ended 3 times since the last weights"):
                ask(sampler, [1])
    finally:
        second.close()
        first.close()


def test_new_weights_begin_another_count(machine):
    sampler = opened(servers=1)
    try:
        for number in (1, 2):
            sampler.load(mark(number))
            for before in range(sampler.restarts, 2 * number):
                wait_until("the server", fakes)[0].kill()
                wait_until("its replacement", lambda before=before: sampler.restarts > before)
        assert ask(sampler, [8]) == [(8, 0, 2)]
        assert sampler.restarts == 4
    finally:
        sampler.close()


def test_a_server_that_cannot_take_weights_ends_the_run(machine):
    machine.setenv("RLX_TEST_SERVER", "refuses")
    with pytest.raises(RlxError, match="could not take the learner's weights: no such layer"):
        opened()


def test_a_server_that_ends_before_it_has_the_weights_is_heard(machine):
    machine.setenv("RLX_TEST_SERVER", "refuses")
    send_file = Channel.send_file

    def send_late(channel, descriptor):
        wait_until("both servers to end", lambda: not fakes())
        send_file(channel, descriptor)

    machine.setattr(Channel, "send_file", send_late)
    with pytest.raises(RlxError, match="could not take the learner's weights: no such layer"):
        opened()


def test_a_server_that_is_killed_while_it_starts_is_started_again(machine, tmp_path):
    machine.setenv("RLX_TEST_SERVER", f"killed={tmp_path / 'death'}:2")
    sampler = opened(servers=1)
    try:
        assert ask(sampler, [8]) == [(8, 0, 0)]
        assert sampler.restarts == 2
    finally:
        sampler.close()


def test_a_server_that_is_always_killed_while_it_starts_ends_the_run(machine, tmp_path):
    machine.setenv("RLX_TEST_SERVER", f"killed={tmp_path / 'death'}:99")
    why = r"ended by SIGKILL .*before it could start; it has ended 3 times"
    with pytest.raises(RlxError, match=why):
        opened(servers=1)


def test_a_server_that_cannot_start_says_why(machine):
    machine.setenv("RLX_TEST_SERVER", "mute")
    why = r'ended with code 5 \(its last words: "no device of mine"\) before it could start'
    with pytest.raises(RlxError, match=why):
        opened()


@pytest.mark.parametrize(
    ("what", "settings", "says"),
    [
        ("plain", {}, "LoRA adapters are merged, not swapped (no adapters here)"),
        ("", {"adapters": "merge"}, "LoRA adapters are merged: sampler.adapters is merge"),
    ],
)
def test_servers_without_adapters_get_merged_weights(machine, what, settings, says):
    machine.setenv("RLX_TEST_SERVER", what)
    sampler = opened(**settings)
    try:
        assert sampler.description == f"vLLM in a pool of 2 servers, on this machine; {says}"
        assert not sampler.takes_adapter
        assert sampler.restarts == 0
    finally:
        sampler.close()


def test_a_long_temporary_path_is_refused_before_anything_starts(machine, tmp_path):
    machine.setattr("tempfile.tempdir", str(tmp_path / ("a" * 120)))
    with pytest.raises(EnvironmentFault, match="too long: set TMPDIR to a shorter one"):
        opened()


def test_the_folder_for_weights_cannot_be_guessed(machine):
    as_rank(machine, 0, 2)
    pools, shared = zip(*(machine_pool._name_folders() for _ in range(2)), strict=True)
    assert pools[0] == pools[1], "the ranks of a machine find the servers there"
    assert shared[0] != shared[1], "somebody else could have made it, to change what is in it"


def test_a_rank_is_told_when_the_first_has_left(machine):
    machine.setattr(vllm_connection, "GONE", 0.3)
    as_rank(machine, 0, 2)
    first = opened()
    as_rank(machine, 1, 2)
    second = opened()
    try:
        second.load(mark(3))  # which the first one does not send
        first.close()
        with pytest.raises(ConnectionError, match="first rank has left the pool"):
            ask(second, range(4))
    finally:
        second.close()


def test_a_rank_that_leaves_waits_for_no_answer(machine):
    as_rank(machine, 0, 2)
    first = opened()
    as_rank(machine, 1, 2)
    second = opened()
    told, sent, send = [], [], Channel.send

    def send_and_note(channel, message):
        send(channel, message)
        sent.append(message)

    machine.setattr(Channel, "send", send_and_note)

    def ask_too_early():
        with pytest.raises(RlxError, match="has left the pool") as caught:
            ask(second, range(4))
        told.append(caught.value)

    try:
        second.load(mark(3))  # which the first one does not send
        asking = threading.Thread(target=ask_too_early)
        asking.start()
        wait_until("both servers to be asked", lambda: len(sent) == 2)
        second.close()
        wait_until("it to end", lambda: not asking.is_alive())
        threads = second._threads._threads
        wait_until("all to end", lambda: not any(thread.is_alive() for thread in threads))
        assert told
    finally:
        second.close()
        first.close()


# Devices -----------------------------------------------------------------------------------------


def test_servers_take_the_gpus_after_those_of_the_ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,4,5,6,7")
    pool, cuda = SamplerPoolSpec(servers=2, tensor_parallel=2), torch.device("cuda", 0)
    shown = [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    assert select_pool_gpus(pool, cuda) == shown
    assert select_pool_gpus(pool, CPU) == [{}, {}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,4,5,6")
    with pytest.raises(
        EnvironmentFault, match=r"need 6 GPUs, but there are 5: lower runner\.ranks"
    ):
        select_pool_gpus(pool, cuda)


# With vLLM ---------------------------------------------------------------------------------------


@needs_vllm
def test_a_model_split_in_two_has_the_learners_weights_and_adapters():
    lora = Lora(rank=4, alpha=8)
    policy, learner = babbler(2), copy.deepcopy(babbler(2))
    adapt_model(learner.model, lora, seed=0)
    requests = [
        CompletionRequest(policy.dialogue.open(f"nums: {n} 3\ntarget: {n}\n"), None, (n, n + 10))
        for n in range(4)
    ]
    pool = {"servers": 1, "tensor_parallel": 2}
    spec = VllmSamplerSpec(engine="vllm", kv_cache_mb=32, pool=pool)
    with open_sampler(replace(babbler(1), lora=lora), spec, RunnerSpec(), CPU) as sampler:
        assert sampler.description == (
            "vLLM in a pool of 1 server, each over 2 devices, on this machine; "
            "LoRA adapters are swapped"
        )
        load_weights(sampler, iter(policy.model.named_parameters()))
        assert furthest(policy, requests, complete(sampler, requests)) <= 5e-5
        for weight in adapter_weights(learner.model).values():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        sampler.load_adapter(adapter_weights(learner.model))
        drawn = complete(sampler, requests)
        assert furthest(learner, requests, drawn) <= 5e-5
        assert furthest(policy, requests, drawn) > 0.1
        (server,) = workers()
    assert has_ended(server)


def complete(sampler, requests):
    with sampler.session() as session:
        return session.generate(requests, ANSWER)
