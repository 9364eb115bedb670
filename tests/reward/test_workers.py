import os
import pickle
import subprocess
import sys
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import hostile_rewards
import psutil
import pytest
from engines import has_ended
from hostile_rewards import (
    length,
    misbehave,
    numpy_grid,
    numpy_score,
    numpy_scores,
    process,
    rank,
    shout,
)
from patience import LIMIT, wait_until
from pebble import ProcessPool
from pool_promises import *  # noqa: F403
from pool_promises import job, value
from rows import each_row

from rlx.errors import EnvironmentFault
from rlx.plugin import Score
from rlx.reward import JobOutcome
from rlx.reward.pool import ChunkWorkers, RewardPool, _RememberingContext


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=2, memory_mb=256) as pool:
        yield pool


def test_a_forked_copy_of_a_reward_gives_no_verdict():
    jobs = [
        job(misbehave(how="fork"), "bad") if number % 4 == 0 else job(length(), "x" * number)
        for number in range(32)
    ]
    expected = [1.0 if number % 4 == 0 else number for number in range(32)]
    with RewardPool(workers=1, memory_mb=256) as pool:
        for _ in range(3):
            assert [value(outcome) for outcome in pool.score(jobs)] == expected


@each_row("make", ["bool_", "float32", "float64", "int64", "array"])
def test_scalars_of_numpy_are_scores(make):
    assert job(numpy_score(make=make), "x").run() == JobOutcome((Score(1.0),))


def test_arrays_of_numpy_are_verdicts():
    assert job(numpy_scores(), "a", "b").run() == JobOutcome((Score(0.0), Score(1.0)))
    with pytest.raises(Exception, match="gave ndarray instead of a list of verdicts"):
        job(numpy_grid(), "a", "b").run()


def test_what_plugins_print_is_escaped_and_named_and_never_on_stdout(capfd):
    """A reward may repeat the model's text, and stdout holds only results."""
    with RewardPool(workers=1, memory_mb=256) as pool:
        named = replace(job(shout(), "\x1b[2Jtwo\nlines"), name="my_reward")
        assert value(pool.score([named])[0]) == value(pool.score([job(shout(), "x")])[0]) == 1.0
    out, err = capfd.readouterr()
    assert (out, err) == (
        "",
        "my_reward: \\x1b[2Jtwo\nmy_reward: lines\nmy_reward: half\nshout: x\nshout: half\n",
    )


def test_workers_killed_while_idle_are_replaced():
    with RewardPool(workers=1, memory_mb=256) as pool:
        pid = value(pool.score([job(hostile_rewards.process(), "x")])[0])
        worker = psutil.Process(int(pid))
        worker.kill()
        wait_until("it to be dead", lambda: has_ended(worker))
        again = value(pool.score([job(hostile_rewards.process(), "x")])[0])
        assert again != pid


def test_a_chunk_that_is_forgotten_while_the_last_worker_dies_has_an_end(monkeypatch):
    """The library puts it into a queue that nobody reads any more."""
    before = set(psutil.Process().children())
    workers = ChunkWorkers(1, 256)
    monkeypatch.setattr(ProcessPool, "schedule", lambda *_, **__: Future())
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(workers.run, pickle.dumps([]), ())
        for process in set(psutil.Process().children()) - before:
            if "spawn_main" in str(process.cmdline()):
                process.kill()
        with pytest.raises(BrokenExecutor, match="all workers have ended"):
            running.result(LIMIT)
    workers.close()


# The pool itself ---------------------------------------------------------------------------------


def test_closing_ends_workers_that_are_busy(tmp_path):
    with RewardPool(workers=1, memory_mb=256) as pool:
        pid = int(value(pool.score([job(hostile_rewards.process(), "x")])[0]))
        pool._workers._pool.schedule(hostile_rewards.dwell, args=(str(tmp_path / "begun"),))
        wait_until("it to be busy", (tmp_path / "begun").exists)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_ends_the_group_of_a_rank_leaves_its_scores_alone():
    """torchrun asks ranks to stop by a signal to their process groups."""
    code = """
import os, signal, time
from rlx.reward.pool import RewardPool
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
    with RewardPool(workers=1, memory_mb=256) as pool:
        scored = pool._workers._pool.schedule(time.sleep, args=(1.0,))
        time.sleep(0.3)
        os.killpg(0, signal.SIGTERM)
        print("scored", scored.result())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], start_new_session=True, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "asked\nscored None\n"), done.stderr


def test_workers_that_cannot_start_are_a_fault_of_the_environment(monkeypatch):
    monkeypatch.setattr("rlx.reward.pool.start_worker", hostile_rewards.leave)
    with pytest.raises(EnvironmentFault, match="cannot start"):
        RewardPool(workers=1, memory_mb=256)


@each_row("victim", ["worker", "child"])
def test_workers_that_are_killed_while_they_start_are_started_again(victim, tmp_path, monkeypatch):
    """At the beginning, and in place of workers that ended idle."""
    kills = tmp_path / "kills"
    monkeypatch.setenv("RLX_TEST_KILLS", str(kills))
    begins = {
        "worker": ("start_worker", hostile_rewards.start_killed),
        "child": ("run_chunk", hostile_rewards.run_chunk_killed),
    }
    monkeypatch.setattr(f"rlx.reward.pool.{begins[victim][0]}", begins[victim][1])
    kills.write_text("3")
    with RewardPool(workers=1, memory_mb=256) as pool:
        assert kills.read_text() == "0"
        assert value(pool.score([job(length(), "abc")])[0]) == 3.0
        if victim == "worker":
            worker = psutil.Process(int(value(pool.score([job(process(), "x")])[0]))).parent()
            kills.write_text("3")
            worker.kill()
            wait_until("it to be dead", lambda: has_ended(worker))
            assert value(pool.score([job(length(), "abc")])[0]) == 3.0
            assert kills.read_text() == "0"
    kills.write_text("4")
    with pytest.raises(EnvironmentFault) as caught:
        RewardPool(workers=1, memory_mb=256)
    assert str(caught.value) == (
        "reward workers cannot start: each of 4 times something killed them (signal 9); is there "
        "enough memory?"
    )


@each_row(("workers", "memory_mb"), [(0, 256), (1, 0)])
def test_an_empty_pool_is_refused(workers, memory_mb):
    with pytest.raises(ValueError, match="at least"):
        RewardPool(workers, memory_mb)


@each_row(
    ("reward", "responses", "deadline"),
    [
        (length(), (), 1.0),
        (length(), ("a", "b"), 1.0),
        (rank(), (), 1.0),
        (length(), ("a",), 0.0),
        (length(), ("a",), float("nan")),
    ],
)
def test_malformed_jobs_are_refused(reward, responses, deadline):
    with pytest.raises(ValueError, match=r"samples for scope|deadline"):
        job(reward, *responses, deadline=deadline)


def test_processes_that_are_ended_with_one_that_failed_are_not_taken_for_killed(subtests):
    for codes, signal in (
        ([None, -9], 9),
        ([-15, 1, -15], None),  # one ended by itself, and the others were told to
        ([1], None),
        ([-15, 143], 15),
        ([None], None),
    ):
        with subtests.test(codes=codes):
            context = _RememberingContext()
            context._started = [SimpleNamespace(exitcode=code) for code in codes]
            assert context.killing_signal == signal
