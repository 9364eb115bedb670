"""What many ask for is worked out once."""

import threading
import time

import pytest

from rlx_web import memo as module
from rlx_web.memo import KEPT, LEAST, SHARE, Memo


@pytest.fixture
def clock(monkeypatch):
    """The time, which passes only when it is told to."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_an_answer_stands_for_a_while_then_is_worked_out_anew(clock):
    memo, answers = Memo(), iter("abc")
    assert memo("k", lambda: next(answers)) == "a"
    clock[0] += LEAST * 0.99
    assert memo("k", lambda: next(answers)) == "a"
    clock[0] += LEAST * 0.02
    assert memo("k", lambda: next(answers)) == "b"


def test_what_takes_long_stands_longer(clock):
    memo, answers = Memo(), iter("abc")

    def slow():
        clock[0] += 2.0
        return next(answers)

    assert memo("k", slow) == "a"
    clock[0] += SHARE * 2.0 - 0.1
    assert memo("k", slow) == "a"
    clock[0] += 0.2
    assert memo("k", slow) == "b"


def test_keys_are_apart_and_the_oldest_are_forgotten(clock):
    memo = Memo()
    assert [memo(k, lambda k=k: f"answer {k}") for k in range(KEPT)] == [
        f"answer {k}" for k in range(KEPT)
    ]
    assert memo(0, lambda: "anew") == "answer 0", "asked for again: it is not the oldest any more"
    memo("one more", lambda: "")
    assert memo(0, lambda: "anew") == "answer 0"
    assert memo(1, lambda: "anew") == "anew"


def test_a_fault_is_not_kept(clock):
    memo = Memo()
    with pytest.raises(OSError):
        memo("k", lambda: (_ for _ in ()).throw(OSError("no disk")))
    assert memo("k", lambda: "again") == "again"


def test_many_at_once_wait_for_one(clock):
    memo, calls, begun, go = Memo(), [], threading.Event(), threading.Event()

    def answer():
        calls.append(1)
        begun.set()
        assert go.wait(30)
        return "x"

    said = []
    threads = [threading.Thread(target=lambda: said.append(memo("k", answer))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    time.sleep(0.05)  # scenario: the others arrive
    assert memo("other", lambda: "at once") == "at once", "another key does not wait"
    go.set()
    for thread in threads:
        thread.join(30)
    assert (len(calls), said) == (1, ["x"] * 8)


def test_pollers_of_the_dashboard_share_an_answer(plain, monkeypatch):
    first = plain.get("/runs/1/live.json?after=1").content
    monkeypatch.setattr("rlx_web.app.live_run", lambda *_: pytest.fail("worked out again"))
    assert plain.get("/runs/1/live.json?after=1").content == first
