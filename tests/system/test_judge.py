"""Judges behind HTTP: a hostile server, a run that ends half-way, and what is never sent."""

import json
import os
import random
import re
import signal
import sqlite3
import zlib
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import Thread

import psutil
import pytest
from judge_server import JudgeServer
from patience import wait_until

from rlx.plugin import Sample
from rlx.reward import RewardJob, RewardPool
from rlx_plugins.judge import Judge, JudgeRanking

TOKEN = "a-token-that-nobody-stores"
TROUBLES = ("429", "500", "garbage", "form", "cut", "never")


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)


@pytest.fixture
def open_server():
    """Makes servers that end with the test."""
    with ExitStack() as ending:
        yield lambda *given, **named: ending.enter_context(closing(JudgeServer(*given, **named)))


def find_number(prompt):
    return int(re.search(r"answer number (\d+)", prompt)[1])


def say_number(prompt):
    return f'Well.\n{{"score": {find_number(prompt) % 11}}}'


def plan_troubles(prompt):
    """Up to three troubles before a reply, the same for the same prompt."""
    rng = random.Random(find_number(prompt))
    return rng.choices(TROUBLES, k=rng.randrange(4))


def build_jobs(server, count, deadline=120.0, **options):
    judge = Judge(
        model="m", base_url=server.url, key="JUDGE_TOKEN", at_once=16, try_seconds=1.0, **options
    )
    return [RewardJob(judge, (build_sample(i),), deadline) for i in range(count)]


def build_sample(number):
    return Sample(
        id=str(number), problem={"question": "?"}, turn="answer", number=1,
        response=f"answer number {number}",
    )  # fmt: skip


def list_values(outcomes):
    return [o.fault if o.fault is not None else o.verdicts[0].value for o in outcomes]


RIGHT = [i % 11 / 10 for i in range(1000)]


def test_a_server_in_trouble_costs_no_verdict(open_server):
    server = open_server(say_number, plan_troubles)
    with RewardPool(2, 1024) as pool:
        outcomes = pool.score(build_jobs(server, 120))
    assert list_values(outcomes) == pytest.approx(RIGHT[:120])
    assert set(server.replied.values()) == {1} and len(server.replied) == 120
    assert 1 <= server.most <= 16
    tries = [len(plan_troubles(f"answer number {i}")) + 1 for i in range(120)]
    assert [o.verdicts[0].parts["requests"] for o in outcomes] == tries
    assert {o.verdicts[0].parts["tokens"] for o in outcomes} == {110.0}
    assert {h["authorization"] for h in server.headers} == {f"bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("trouble", "fault"),
    [
        ("429", "JudgeError: the judge gave no verdict after 2 tries: status 429: "),
        ("500", "JudgeError: the judge gave no verdict after 2 tries: status 500: "),
        ("garbage", "JudgeError: the judge gave no verdict after 2 tries: unreadable reply: "),
        ("form", "JudgeError: the judge gave no verdict after 2 tries: unreadable reply: "),
        ("cut", "JudgeError: the judge gave no verdict after 2 tries: APIConnectionError: "),
        ("never", "JudgeError: the judge gave no verdict after 2 tries: APITimeoutError: "),
    ],
)
def test_a_judge_without_a_verdict_is_absent_with_its_reason(trouble, fault, open_server):
    server = open_server(say_number, lambda prompt: [trouble] * 9 * (find_number(prompt) == 1))
    with RewardPool(1, 1024) as pool:
        found = list_values(pool.score(build_jobs(server, 3, retries=1)))
    assert found[0] == 0.0 and found[2] == 0.2
    assert re.sub(r"^line \d+ of its file: ", "", found[1]).startswith(fault)
    assert TOKEN not in found[1]


def test_an_unreadable_reply_is_asked_for_with_another_seed(open_server):
    server = open_server(say_number, lambda prompt: ["form", "500", "form"])
    with RewardPool(1, 1024) as pool:
        pool.score(build_jobs(server, 1))
    assert server.seeds == [0, 100, 100, 200]


def count_kept(path):
    if not path.exists():
        return 0
    with sqlite3.connect(path, timeout=60) as file:
        try:
            return file.execute("SELECT count(*) FROM answers").fetchone()[0]
        except sqlite3.OperationalError:  # before its table is there
            return 0


def test_what_was_answered_before_a_kill_is_not_asked_again(tmp_path, open_server):
    path = tmp_path / "answers" / "0.db"
    server = open_server(say_number, last=40)
    with RewardPool(1, 1024, path) as pool:
        payload = build_jobs(server, 100)
        scoring = Thread(target=lambda: pool.score(payload), daemon=True)
        scoring.start()
        wait_until("forty answers", lambda: count_kept(path) == 40)
        asked = {prompt: server.asked[prompt] for prompt in server.replied}
        server.last = None
        for worker in psutil.Process().children():
            with suppress(psutil.Error):  # it has just ended
                for process in worker.children():
                    process.kill()
        scoring.join()  # in another process, as a resumed run does
    with RewardPool(1, 1024, path) as pool:
        assert list_values(pool.score(build_jobs(server, 100))) == pytest.approx(RIGHT[:100])
    assert len(asked) == 40 and len(server.replied) == 100
    assert {prompt: server.asked[prompt] for prompt in asked} == asked
    assert TOKEN.encode() not in path.read_bytes()


def test_a_judged_run_that_is_killed_half_way_asks_nobody_twice(home, open_server):
    server = open_server(lambda prompt: f'{{"score": {zlib.crc32(prompt.encode()) % 11}}}')
    judged = {"plugin": "judge", "turn": "answer", "model": "m", "base_url": server.url,
              "key": None, "question": "{target}", "deadline": 600, "at_once": 8}  # fmt: skip
    sets = {
        **home.brief,
        "phases.0.steps": 3,
        "phases.1.steps": 2,
        "runner.checkpoint.every": 1,
        "rewards.turn.judged": json.dumps(judged),
    }
    whole = home.submit(sets=sets)
    wanted = set(server.replied)
    server.asked.clear()
    server.replied.clear()
    server.last = len(wanted) // 2
    killed = home.submit("-d", "--again", sets=sets)
    answers = Path(home.run(killed).directory) / "answers" / "0.db"
    home.until(lambda: count_kept(answers) == len(wanted) // 2, "half of the answers")
    before = set(server.replied)
    assert 1 <= home.run(killed).step < home.run(whole).steps_total
    (rank,) = home.ranks(killed)
    os.killpg(rank, signal.SIGKILL)
    server.last = None
    home.until(lambda: home.run(killed).ended, "the run to end")
    assert home.run(killed).status == "finished", home.run(killed).reason
    assert {prompt: server.asked[prompt] for prompt in before} == dict.fromkeys(before, 1)
    assert set(server.replied) == wanted and set(server.replied.values()) == {1}
    assert home.differences(whole, killed) == []
    assert home.run(killed).attempt > 1


def test_a_run_ends_with_a_checkpoint_when_its_judge_has_cost_enough(home, open_server):
    server = open_server(lambda prompt: f'{{"score": {zlib.crc32(prompt.encode()) % 11}}}')
    judged = {"plugin": "judge", "turn": "answer", "model": "m", "base_url": server.url,
              "key": None, "question": "{target}", "deadline": 600, "spend_at_most": 1e-9,
              "price": {"prompt": 1, "completion": 2}}  # fmt: skip
    sets = {**home.brief, "runner.checkpoint.every": 0, "rewards.turn.judged": json.dumps(judged)}
    done = home.rlx("submit", home.yaml, "-q", "--again", sets=sets)
    assert done.returncode == 1
    run = home.run(done.stdout.strip())
    assert run.reason.endswith("1e-09 is their limit; a checkpoint of step 1 is written")
    with home.registry() as registry:
        (left,) = registry.results.checkpoints(run.id)
    assert left.step == run.step == 1


def test_rankings_and_limits_per_minute(open_server):
    def prefer(prompt):
        first, second = map(int, re.findall(r"answer number (\d+)", prompt))
        return f'{{"better": "{"first" if first > second else "second"}"}}'

    server = open_server(prefer)
    limits = {"requests_per_minute": 6000, "tokens_per_minute": 1e6}
    judge = JudgeRanking(model="m", base_url=server.url, key=None, **limits)
    samples = tuple(map(build_sample, range(4)))
    with RewardPool(1, 1024) as pool:
        (outcome,) = pool.score([RewardJob(judge, samples, 60.0)])
    assert [v.value for v in outcome.verdicts] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert server.replied.total() == 12
