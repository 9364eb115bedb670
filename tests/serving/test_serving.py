"""The interface of OpenAI over a small random model, in process."""

import asyncio
import json
import random
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from babblers import babbler
from fastapi.testclient import TestClient
from rows import each_row

from rlx.model import ChatDialogue, build_policy
from rlx.rollout import CompletionRequest
from rlx.sampler import SamplingEngine, TransformersSampler
from rlx.serving import Batcher, ChatRequest, Reply, ServedModel, create_app, responses
from rlx.spec import TinyModelSpec, TurnSpec

TOKEN = "a-token-of-the-tests"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
CPU = torch.device("cpu")
MESSAGES = [{"role": "user", "content": "nums: 2\n"}]
BYTES = TinyModelSpec(
    tokenizer="bytes", hidden_size=32, heads=1, kv_heads=1, layers=1, intermediate_size=32,
    initializer_range=0.3, max_position=256,
)  # fmt: skip
PROMPTS = ("nums: 2 3\ntarget: 5\n", "nums: 7\n", "target: 9 9 9\n")


class Served:
    """A model, its engine, and a client of it."""

    def __init__(self, policy, batcher, places=4096):
        self.policy = policy
        self.model = ServedModel("tiny", policy, policy.context_length, frozenset({"alias"}))
        self.app = create_app(self.model, batcher.submit, TOKEN)
        self.client = TestClient(self.app, headers=HEADERS)

    def complete(self, prompt=PROMPTS[0], **fields):
        return self.post("completions", prompt=prompt, **fields)

    def chat(self, content=PROMPTS[0], **fields):
        messages = [{"role": "user", "content": content}]
        return self.post("chat/completions", messages=messages, **fields)

    def post(self, path, **fields):
        response = self.client.post(f"/v1/{path}", json={"model": "tiny", **fields})
        assert response.status_code == 200, response.text
        if not fields.get("stream"):
            return response.json()
        *events, last = response.text.strip().split("\n\n")
        assert last == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def serve(policy):
    engine = TransformersSampler(policy, max_rows=64, device=CPU)
    with Batcher(engine, max_rows=64, places=4096) as batcher:
        yield Served(policy, batcher)


@pytest.fixture(scope="module")
def words():
    """Served with a closed vocabulary; about one token in ten ends a turn."""
    with serve(babbler(0)) as served:
        yield served


@pytest.fixture(scope="module")
def characters():
    """Served with bytes as tokens, most of which are parts of characters, or of none."""
    with serve(build_policy(BYTES, 3)) as served:
        yield served


# What is sampled ---------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_the_sampler(words):
    contexts = [words.policy.dialogue.open(prompt) for prompt in PROMPTS]
    requests = [CompletionRequest(context, None, (0,)) for context in contexts]
    sampler = TransformersSampler(words.policy, max_rows=8, device=CPU)
    with sampler.session() as session:
        groups = session.generate(requests, TurnSpec(max_new_tokens=12, top_k=1))
    greedy = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
    together = words.complete(list(PROMPTS), **greedy)["choices"]
    chats = [words.chat(prompt, **greedy)["choices"][0] for prompt in PROMPTS]
    for context, (own,), *served in zip(contexts, groups, together, chats, strict=True):
        for choice in served:
            assert choice["prompt_token_ids"] == list(context)
            assert choice["token_ids"] == list(own.token_ids)
            assert choice["finish_reason"] == own.finish_reason


def test_log_likelihoods_are_those_of_a_plain_forward(words):
    """With what lm-eval sends: tokens, repeated, and one token more."""
    ids = [[1, *words.policy.dialogue.encode(prompt)] for prompt in PROMPTS]
    asked = {"echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    for most in (0, 1):
        found = words.complete(ids, max_tokens=most, **asked)
        for choice, own in zip(found["choices"], ids, strict=True):
            with torch.no_grad():
                logits = words.policy.model(input_ids=torch.tensor([own])).logits[0]
            plain = logits.log_softmax(-1)
            expected = [float(plain[at, token]) for at, token in enumerate(own[1:])]
            logprobs = choice["logprobs"]
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            assert logprobs["token_logprobs"][1 : len(own)] == pytest.approx(expected, abs=1e-5)
            assert len(logprobs["tokens"]) == len(own) + most
            best = [max(top.values()) for top in logprobs["top_logprobs"][1 : len(own)]]
            assert best == pytest.approx(plain[: len(own) - 1].max(-1).values.tolist(), abs=1e-5)
            if most:  # greedy: the likeliest token, to the bit
                assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    prompt = sum(map(len, ids))
    assert found["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3
    }  # fmt: skip


# Texts -------------------------------------------------------------------------------------------


def test_a_text_ends_before_its_stop_string_wherever_tokens_end(characters):
    whole = characters.complete(seed=1, max_tokens=60)["choices"][0]["text"]
    assert len(whole) > 20
    for start in range(0, 16, 3):
        stop = whole[start : start + 3]
        found = characters.complete(
            seed=1, max_tokens=60, stop=["never there", stop], logprobs=0, return_token_ids=True
        )["choices"][0]
        assert found["text"] == whole[: whole.find(stop)]
        assert found["finish_reason"] == "stop"
        shown = characters.policy.dialogue.read(found["token_ids"])[0]
        assert shown[: whole.find(stop)] == found["text"] and stop in shown
        assert all(offset < whole.find(stop) for offset in found["logprobs"]["text_offset"])


def test_bytes_of_tokens_are_those_of_the_text(characters):
    found = characters.chat(seed=2, n=4, max_tokens=40, logprobs=True, top_logprobs=3)
    for choice in found["choices"]:
        content = choice["logprobs"]["content"]
        joined = b"".join(bytes(token["bytes"] or ()) for token in content)
        assert joined.decode(errors="replace") == choice["message"]["content"]
        assert any(len(bytes(token["bytes"] or ())) == 1 for token in content)
        assert all(len(token["top_logprobs"]) == 3 for token in content)


def test_a_stream_says_what_a_response_says(characters, monkeypatch):
    monkeypatch.setattr(responses, "time", SimpleNamespace(time=count().__next__))
    asked = {"seed": 5, "n": 2, "max_tokens": 30, "return_token_ids": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    whole = characters.complete(logprobs=1, echo=True, **asked)
    *chunks, last = characters.complete(logprobs=1, echo=True, **asked, **streamed)
    assert last["usage"] == whole["usage"] and last["choices"] == []
    assert [chunk["choices"][0] for chunk in chunks] == whole["choices"]
    whole = characters.chat(logprobs=True, **asked)
    chunks = characters.chat(logprobs=True, stream=True, **asked)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert [{"message": c.pop("delta"), **c} for c in streamed] == whole["choices"]


# Tools -------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TEMPLATE = """{%- for t in tools or [] -%}{{ '[tool]' + t | tojson }}{%- endfor -%}
{%- for m in messages -%}{{ '[' + m.role + ']' + m.content }}
{%- for c in m.tool_calls or [] -%}{{ c.function.name + c.function.arguments.x | string }}
{%- endfor -%}{{ '<|im_end|>' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '[assistant]' }}{%- endif -%}"""


@pytest.fixture(scope="module")
def caller():
    """A model whose chat template writes tools."""
    from checkpoints import Style, tokenizer

    written = tokenizer(Style(TEMPLATE, ("<|im_end|>", "<|doc_end|>"), "<|im_end|>"))
    policy = build_policy(BYTES, 3)
    dialogue = ChatDialogue(written, (written.eos_token_id,))
    policy = replace(policy, tokenizer=written, dialogue=dialogue, end_ids=dialogue.end_ids)
    return ServedModel("caller", policy, 4096)


def test_tools_calls_and_results_are_written_by_the_template(caller):
    call = {"id": "call_1", "function": {"name": "add", "arguments": '{"x": 3}'}}
    request = ChatRequest.model_validate(
        {
            "model": "caller",
            "tools": TOOLS,
            "messages": [
                {"role": "developer", "content": "Add."},
                {"role": "user", "content": [{"type": "text", "text": "3<|im_end|>?"}]},
                {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
                {"role": "tool", "content": "6<|im_end|>", "tool_call_id": "call_1"},
            ],
        }
    )
    text = caller.policy.dialogue.decode_tokens(caller.encode_messages(request))
    assert text == (
        "[tool]" + json.dumps(TOOLS[0]) + "[system]Add.<|im_end|>[user]3< |im_end|>?<|im_end|>"
        "[assistant]add3<|im_end|>[tool]6< |im_end|><|im_end|>[assistant]"
    )
    without = request.model_copy(update={"tool_choice": "none"})
    assert "[tool]{" not in caller.policy.dialogue.decode_tokens(caller.encode_messages(without))


def test_tools_that_no_template_writes_are_refused(words):
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
    response = words.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


ADD = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'


@each_row(
    "text, content, calls",
    [
        ("no call", "no call", []),
        (ADD, None, [("add", '{"x": 1}')]),
        (f"I add.\n{ADD}\n{ADD}\n", "I add.", [("add", '{"x": 1}')] * 2),
        ("<tool_call>add 1</tool_call>", "<tool_call>add 1</tool_call>", []),
        ('<tool_call>{"name": "add"}', None, [("add", "{}")]),
        ('<tool_call>[1]</tool_call> <tool_call>{"name": 3}</tool_call>',
         '<tool_call>[1]</tool_call> <tool_call>{"name": 3}</tool_call>', []),
    ],
)  # fmt: skip
def test_calls_are_read_from_a_reply(caller, text, content, calls):
    message = caller.parse_message(Reply(text, "stop", (), (), ()), TOOLS)
    assert message["content"] == content
    found = [tuple(call["function"].values()) for call in message.get("tool_calls", ())]
    assert found == calls
    assert caller.parse_message(Reply(text, "stop", (), (), ()), [])["content"] == text


# Errors and access -------------------------------------------------------------------------------


@each_row(
    "path, body, status, param, said",
    [
        ("completions", {"prompt": "nums: 2\n", "model": "gpt"}, 404, "model", "no model 'gpt'"),
        ("completions", {}, 400, "prompt", "Field required"),
        ("completions", {"prompt": []}, 400, "prompt", "prompt"),
        ("completions", {"prompt": ""}, 200, None, None),  # begins with a token of its own
        ("completions", {"prompt": [99999]}, 400, "prompt", "no token 99999"),
        ("completions", {"prompt": "\ud800"}, 400, None, "half of a surrogate pair"),
        ("completions", {"prompt": "1", "temperature": 3}, 400, "temperature", "less than"),
        ("completions", {"prompt": "1", "colour": 0}, 400, "colour", "unrecognized"),
        ("completions", {"prompt": "1", "suffix": "x"}, 400, "suffix", "not supported"),
        ("completions", {"prompt": "1", "best_of": 2}, 400, "best_of", "not supported"),
        ("completions", {"prompt": "1", "max_tokens": 0}, 400, "max_tokens", "needs echo"),
        ("completions", {"prompt": "1", "max_tokens": 9999}, 400, "max_tokens", "maximum context"),
        ("completions", {"prompt": "1", "stop": [""]}, 400, "stop.0", "at least 1"),
        ("completions", {"prompt": "1", "n": 128, "max_tokens": 2}, 200, None, None),
        ("completions", {"prompt": ["1"] * 40, "n": 128}, 429, None, "4096 places"),
        ("completions", {"prompt": "é"}, 400, "prompt", "no token for"),
        ("completions", None, 400, None, "not JSON"),
        ("chat/completions", {"messages": [*MESSAGES, *MESSAGES]}, 400, "messages", "in turn"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 1}, 400, "top_logprobs", ""),
        ("chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, 400,
         "tool_choice", "'none' or 'auto'"),
        ("chat/completions", {"messages": MESSAGES, "presence_penalty": 1}, 400,
         "presence_penalty", "not supported"),
        ("chat/completions", {"messages": MESSAGES, "presence_penalty": 0, "user": "x",
                              "max_tokens": None, "stop": None, "model": "alias"}, 200, None, None),
        ("nothing", {}, 404, None, "Not Found"),
    ],
)  # fmt: skip
def test_faults_have_the_form_of_openai(words, path, body, status, param, said):
    body = "{" if body is None else json.dumps({"model": "tiny", **body})
    headers = {"Content-Type": "application/json"}
    response = words.client.post(f"/v1/{path}", content=body, headers=headers)
    assert response.status_code == status, response.text
    if status != 200:
        error = response.json()["error"]
        assert error["param"] == param
        assert said in error["message"]
        kinds = {429: "rate_limit_error"}
        assert error["type"] == kinds.get(status, "invalid_request_error")
        assert ("retry-after" in response.headers) == (status == 429)


def test_a_body_that_is_not_called_json_is_a_fault_of_the_request(words):
    headers = {"Content-Type": "text/plain"}
    response = words.client.post("/v1/completions", content="{}", headers=headers)
    assert response.status_code == 400
    assert "is the Content-Type application/json?" in response.json()["error"]["message"]


def test_models_are_listed(words):
    (card,) = words.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 2048)
    assert words.client.get("/v1/models/alias").json() == card
    assert words.client.get("/v1/models/gpt").status_code == 404


@each_row(
    "token, headers, status",
    [
        (TOKEN, {}, 401),
        (TOKEN, {"Authorization": "Bearer another"}, 401),
        (TOKEN, {"Authorization": f"Basic {TOKEN}"}, 401),
        (TOKEN, {"Authorization": f"bearer {TOKEN}"}, 200),
        (None, {"Host": "localhost:8712"}, 200),
        (None, {"Host": "[::1]:8712", "Authorization": "Bearer whatever"}, 200),
        (None, {"Host": "elsewhere.org"}, 403),
        (None, {"Host": "127.0.0.1", "Origin": "http://elsewhere.org"}, 403),
    ],
)
def test_access(words, token, headers, status):
    client = TestClient(create_app(words.model, lambda job: None, token))
    response = client.get("/v1/models", headers=headers)
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["message"]


# Many at once ------------------------------------------------------------------------------------


class Wrapped(SamplingEngine):
    """The sampler, whose sessions a test changes."""

    description = "wrapped"

    def __init__(self, policy):
        self.engine = TransformersSampler(policy, max_rows=64, device=CPU)

    @contextmanager
    def session(self):
        with self.engine.session() as self.inner:
            yield self

    def load(self, weights): ...


class Gate(Wrapped):
    """Waits before it samples, and writes down what it was asked for."""

    def __init__(self, policy):
        super().__init__(policy)
        self.begun, self.opened, self.sampled = Event(), Event(), []

    def generate(self, requests, sampling):
        self.begun.set()
        assert self.opened.wait(60)
        self.sampled += [request.context for request in requests]
        return self.inner.generate(requests, sampling)


def test_of_two_hundred_requests_none_is_lost_or_crossed_and_who_leaves_frees_a_place(words):
    gate = Gate(words.policy)
    draw = random.Random(0)
    bodies = [
        {"model": "tiny", "prompt": f"nums: {k % 97}\n", "max_tokens": 1 + k % 6, "seed": k}
        for k in range(200)
    ]
    alone = [words.complete(**body)["choices"][0]["text"] for body in bodies[::9]]
    leavers = {k for k in range(1, 200) if draw.random() < 0.3}

    async def ask(app, body, leaves):
        """One request below HTTP: a client that leaves disconnects instead of waiting."""
        sent, messages = [], [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            if messages:
                return messages.pop()
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        headers = {**HEADERS, "Content-Type": "application/json", "Host": "test"}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": raw,
                 "query_string": b"", "scheme": "http", "server": ("test", 80),
                 "http_version": "1.1", "root_path": "", "app": app}  # fmt: skip
        await app(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], body

    async def ask_all(served, batcher):
        left, never = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(ask(served.app, bodies[0], never))
        await asyncio.to_thread(gate.begun.wait, 60)
        tasks = [
            asyncio.create_task(ask(served.app, body, left if k in leavers else never))
            for k, body in enumerate(bodies[1:], start=1)
        ]
        while batcher.taken < 200:
            await asyncio.sleep(0)
        full = await ask(served.app, bodies[0], never)
        left.set()
        gone = [tasks[k - 1] for k in leavers]
        await asyncio.gather(*gone)
        assert batcher.taken == 200 - len(leavers)
        gate.opened.set()
        return full, [await first, *await asyncio.gather(*tasks)]

    with Batcher(gate, max_rows=64, places=200) as batcher:
        served = Served(words.policy, batcher)
        (refused, _), answers = asyncio.run(ask_all(served, batcher))
    assert refused == 429
    for k, (status, _) in enumerate(answers):
        assert status == (499 if k in leavers else 200)
    assert len(gate.sampled) == 200 - len(leavers)
    for text, (status, body) in zip(alone, answers[::9], strict=True):
        assert status == 499 or json.loads(body)["choices"][0]["text"] == text
    assert batcher.taken == 0


class Broken(Wrapped):
    """Cannot sample some contexts."""

    def generate(self, requests, sampling):
        if any(len(request.context) > 8 for request in requests):
            raise RuntimeError("no memory")
        return self.inner.generate(requests, sampling)


def test_a_request_that_fails_fails_no_other_one(words):
    with Batcher(Broken(words.policy), max_rows=64, places=99) as batcher:
        client = TestClient(Served(words.policy, batcher).app, headers=HEADERS,
                            raise_server_exceptions=False)  # fmt: skip
        body = {"model": "tiny", "prompt": [[4] * 9], "max_tokens": 2}
        failed = client.post("/v1/completions", json=body)
        assert failed.status_code == 500
        assert failed.json()["error"]["type"] == "server_error"
        assert "RuntimeError" in failed.json()["error"]["message"]
        other = client.post("/v1/completions", json={**body, "prompt": [[4] * 8]})
        assert other.status_code == 200
        scored = client.post("/v1/completions", json={**body, "prompt": [4], "logprobs": 1})
        assert scored.status_code == 400  # this engine computes none
        assert "computes no log-probabilities" in scored.json()["error"]["message"]
