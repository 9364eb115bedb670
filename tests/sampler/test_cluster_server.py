"""What the actor of a vLLM server does on a Ray cluster, with servers that do not import vLLM; see
tests/fake_vllm_server.py. tests/system/test_ray_servers.py has the same with Ray and vLLM."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from patience import wait_until
from safetensors.torch import save

from rlx.sampler import vllm_process
from rlx.sampler.cluster_pool import _cut_chunks, _read_files
from rlx.sampler.cluster_server import ClusterServer
from rlx.sampler.server_pool import ADAPT, LOAD
from rlx.sampler.vllm_session import build_row_request
from rlx.spec import TurnSpec

TESTS = Path(__file__).parents[1]
TURN = TurnSpec(max_new_tokens=4)
CPU = {"device": "cpu", "adapter": None}


class Store:
    """What the run's first rank has published, without Ray: a reference is the value, and whoever
    looks for weights waits for them."""

    def __init__(self):
        self.starts, self.published, self.changed = 0, {}, threading.Condition()
        files = {"config.json": b"{}"}
        self.model = {"files": files, "settings": CPU, "threads": 1}
        self.start = SimpleNamespace(remote=lambda number: (self.count_start(), [self.model]))
        self.find = SimpleNamespace(remote=self.await_version)

    def count_start(self):
        self.starts += 1
        return self.starts - 1

    def await_version(self, version):
        with self.changed:
            self.changed.wait_for(
                lambda: any(number >= version for number, _ in self.published.values())
            )
            return self.published

    def publish(self, kind, version, mark):
        kept = {} if kind == LOAD else self.published
        chunk = save({"mark": torch.tensor(mark)})
        with self.changed:
            self.published = {**kept, kind: (version, [chunk])}
            self.changed.notify_all()


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_process, "WORKER", "fake_vllm_server")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("ray.get", lambda reference: reference)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    return Store()


@pytest.fixture
def server(store, tmp_path):
    one = ClusterServer(3, store, tmp_path)
    yield one
    one.close()
    assert not any(Path("/dev/shm").glob(f"{tmp_path.name}-*"))


def ask(server, version, *seeds):
    request = build_row_request([((1, 2), seed) for seed in seeds], TURN)
    return server.generate({**request, "version": version})


def tokens(answer):
    """Seed, server and weights of each row."""
    return [tuple(row[0]) for row in answer["rows"]]


def test_it_finds_the_weights_that_a_request_wants(store, server):
    assert server.describe()["longest"] == 128
    store.publish(LOAD, 1, 5)
    assert tokens(ask(server, 1, 7, 8)) == [(7, 3, 5), (8, 3, 5)]
    store.publish(LOAD, 2, 6)
    assert server.load(2) == {"lines": [], "life": 0, "restarts": 0}
    assert tokens(ask(server, 2, 9)) == [(9, 3, 6)]
    store.publish(ADAPT, 3, 7)
    assert tokens(ask(server, 3, 9)) == [(9, 3, 7)]
    assert server._versions == {LOAD: 2, ADAPT: 3}
    store.publish(LOAD, 4, 8)
    assert tokens(ask(server, 4, 9)) == [(9, 3, 8)]
    assert server._versions == {LOAD: 4}
    assert store.starts == 1


def test_it_replaces_one_that_ends_and_says_so(store, server, monkeypatch, tmp_path):
    monkeypatch.setenv("RLX_TEST_SERVER", f"dies={tmp_path / 'death'}:1")
    store.publish(LOAD, 1, 5)
    answer = ask(server, 1, 7)
    assert tokens(answer) == [(7, 3, 5)]
    assert answer["restarts"] == 1
    said = "\n".join(answer["lines"])
    assert "vLLM server 3 has not answered 1 rows: they are asked again" in said
    assert 'was ended by SIGKILL (its last words: "the machine has no memory left")' in said
    assert ask(server, 1, 7)["lines"] == [], "each line is said once"


def test_an_actor_that_was_started_again_counts_it(store, server):
    store.count_start()
    assert server.describe()["life"] == 1


def test_a_request_for_later_weights_does_not_keep_those_before_from_being_loaded(store, server):
    """A rank that sends no weights may ask before those are published that an adapter is added to;
    the one that sends them waits until they are loaded."""
    answers = []
    early = threading.Thread(target=lambda: answers.append(ask(server, 2, 7)))
    server.describe()
    early.start()
    store.publish(LOAD, 1, 5)
    server.load(1)
    store.publish(ADAPT, 2, 6)
    early.join()
    assert tokens(answers[0]) == [(7, 3, 6)]
    assert server.load(1)["restarts"] == 0
    assert tokens(ask(server, 2, 8)) == [(8, 3, 6)], "later ones are not replaced by those before"


def test_a_server_that_starts_can_be_ended(store, server, monkeypatch):
    monkeypatch.setenv("RLX_TEST_SERVER", "slow")
    answers = []
    starting = threading.Thread(target=lambda: answers.append(server.describe()))
    starting.start()
    wait_until("it to start", lambda: server._keeper)
    server.close()
    starting.join()
    assert "closed while they started" in answers[0]["error"]


@pytest.mark.parametrize(
    ("what", "ask", "says"),
    [
        ("mute", ClusterServer.describe, 'its last words: "no device of mine"'),
        ("refuses", lambda server: server.load(1), "could not take the learner's weights"),
        ("refuses", lambda server: ask(server, 1, 7), "could not take the learner's weights"),
        ("dies=/nowhere/death:99", lambda server: ask(server, 1, 7), "ended with code 1"),
    ],
)
def test_what_it_can_never_do_is_an_error(what, ask, says, store, server, monkeypatch):
    monkeypatch.setenv("RLX_TEST_SERVER", what)
    store.publish(LOAD, 1, 5)
    assert says in ask(server)["error"]
    assert (says in ask(server)["error"], store.starts) == (True, 1), "it is started once"


class Files:
    """A model whose tokenizer has several chat templates."""

    def write(self, folder):
        (folder / "config.json").write_text("{}")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tools.jinja").write_text("tools")


def test_files_travel_with_their_folders(store, server, tmp_path):
    files = _read_files(Files())
    assert files == {"config.json": b"{}", "additional_chat_templates/tools.jinja": b"tools"}
    store.model["files"] = files
    server.describe()
    assert (tmp_path / "additional_chat_templates" / "tools.jinja").read_text() == "tools"


def test_weights_travel_in_chunks_each_once(monkeypatch):
    monkeypatch.setattr("rlx.sampler.cluster_pool.CHUNK", 100)
    first = torch.arange(20.0)
    weights = {"a": first, "tied": first, "b": torch.ones(4, 2).T, "large": torch.zeros(99)}
    chunks = list(_cut_chunks(weights))
    assert [list(chunk) for chunk in chunks] == [["a"], ["b"], ["large"]]
    assert all(weight.is_contiguous() for chunk in chunks for weight in chunk.values())
    half = {name: weight.bfloat16() for name, weight in weights.items() if name != "tied"}
    assert [list(chunk) for chunk in _cut_chunks(half)] == [["a", "b"], ["large"]]
