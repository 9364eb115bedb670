"""`rlx serve` as its users meet it: a server process, and OpenAI's own client."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import yaml
from dashboards import serve
from patience import wait_until
from real_models import make_real_checkpoint

from rlx.cli import main
from rlx.plugin import Sample
from rlx.reward import RewardJob, RewardPool
from rlx_plugins.judge import Judge, JudgeRanking

JUDGED = Path(__file__).parents[2] / "experiments" / "judged"
TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random body with SmolLM2's tokenizer and chat template."""
    return make_real_checkpoint(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def served(folder):
    with serve("serve", folder, "--token", TOKEN) as (process, port):
        yield (
            process,
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=TOKEN, max_retries=0),
        )


def test_the_client_of_openai_works_unchanged(served, folder):
    _, client = served
    (model,) = client.models.list().data
    assert model.id == str(folder)
    messages = [{"role": "user", "content": "Spell é."}]
    asked = {"model": model.id, "messages": messages, "seed": 3, "max_tokens": 12}
    reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, n=2)
    texts = [choice.message.content for choice in reply.choices]
    assert texts[0] != texts[1]
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    for choice in reply.choices:
        shown = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
        assert shown.decode(errors="replace") == choice.message.content
    chunks = [*client.chat.completions.create(**asked, stream=True)]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert (said, chunks[-1].choices[0].finish_reason) == (texts[0], reply.choices[0].finish_reason)
    text = client.completions.create(
        model=folder.name, prompt="One two", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    assert text.choices[0].text.startswith("One two")
    assert text.choices[0].logprobs.token_logprobs[0] is None


@pytest.mark.parametrize(
    ("kind", "file", "name"), [(Judge, "policy", "judged"), (JudgeRanking, "ranked", "ranked")]
)
def test_the_shipped_judges_can_ask_it(served, folder, monkeypatch, kind, file, name):
    """Random weights give no verdict; what they reply is read, and nothing is refused."""
    _, client = served
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    options = yaml.safe_load((JUDGED / f"{file}.yaml").read_text())["rewards"]["turn"][name]
    options = {option: value for option, value in options.items() if option in kind.model_fields}
    there = {"model": folder.name, "base_url": str(client.base_url), "key": "JUDGE_TOKEN"}
    samples = [
        Sample(
            id="a", problem={"task": "x plus 3"}, turn="answer", number=1, response="",
            spans={"answer": f"def f(x): return x {sign} 3"},
        )
        for sign in "+-"
    ]  # fmt: skip
    asked = samples if kind is JudgeRanking else samples[:1]
    with RewardPool(1, 1024) as pool:
        (outcome,) = pool.score(
            [RewardJob(kind(**options | there, retries=0), tuple(asked), 300.0)]
        )
    assert "no verdict after 1 tries: unreadable reply: " in outcome.fault


def test_an_interrupt_ends_it_although_somebody_still_waits(served, folder):
    process, client = served
    asked = {"model": folder.name, "prompt": "On and on", "max_tokens": 900, "n": 100}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.completions.create, **asked)
        wait_until("the long request to be sampled", lambda: waiting.running())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        with pytest.raises(openai.APIError):
            waiting.result()


def test_only_programs_of_this_machine_are_served_without_a_token(folder, capsys):
    assert main(["serve", str(folder), "--no-token", "--host", "0.0.0.0"]) == 2
    assert "only on this machine's own address" in capsys.readouterr().err
