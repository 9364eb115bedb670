"""Workers that score: what a reward does wrong costs its own verdict, and what ends workers."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import hostile_rewards
import psutil
import pytest
from engines import has_ended
from hostile_rewards import (
    Abstains,
    Grows,
    Unreadable,
    Unsendable,
    grow,
    length,
    misbehave,
    modules,
    numpy_grid,
    numpy_score,
    numpy_scores,
    process,
    rank,
    shout,
)
from patience import wait_until
from rows import each_row

from rlx.errors import EnvironmentFault
from rlx.plugin import Action, Reward, Sample, Score
from rlx.reward import JobOutcome, PooledHost, RewardJob, RewardPool
from rlx.reward.plugin_process import LONGEST_REASON

DEADLINE = 0.4


def sample(response, problem):
    return Sample(id="a", problem=problem, turn="answer", number=1, response=response)


def job(reward, *responses, deadline=5.0):
    return RewardJob(reward, tuple(sample(response, {}) for response in responses), deadline)


def value(outcome):
    (verdict,) = outcome.verdicts
    return verdict.value


def test_verdicts_come_back_in_order(pool):
    outcomes = pool.score([job(length(), "x" * n) for n in range(300)])
    assert [value(outcome) for outcome in outcomes] == list(range(300))


def test_texts_of_a_reward_can_be_stored(pool):
    """A scorer that repeats the model's text may give half a character, NUL, or any length."""
    (half,) = pool.score([job(misbehave(how="half_reason"), "bad")])
    assert half.verdicts[0].reason == "half \ufffd, NUL ␀"
    (long,) = pool.score([job(misbehave(how="long_reason"), "bad")])
    cut = f"{'x' * LONGEST_REASON}… (100,000 characters)"
    assert long.verdicts[0].reason == cut
    (parts,) = pool.score([job(misbehave(how="half_part"), "bad")])
    assert parts.verdicts[0].parts == {"half \ufffd, NUL ␀": 1.0, cut: 2.0}
    (fault,) = pool.score([job(misbehave(how="half_fault"), "bad")])
    assert fault.fault.startswith("ValueError: half \ufffd, NUL ␀xxx")
    assert fault.fault.endswith("x… (100,025 characters)")
    assert len(fault.fault) < LONGEST_REASON + 50


def test_a_call_that_changes_its_input_changes_no_other(pool):
    """Calls that are sent together shared the objects that they had in common."""
    shared = {"numbers": [1, 2, 3]}
    outcomes = pool.score([RewardJob(grow(), (sample("x", shared),), 5.0) for _ in range(4)])
    assert [value(outcome) for outcome in outcomes] == [4.0] * 4
    host = PooledHost(Grows(), pool, 5.0)
    assert host.reset([(shared, seed) for seed in range(4)]) == [[1, 2, 3, 0]] * 4
    steps = host.step([(shared["numbers"], Action(text="x"))] * 4)
    assert [step.info for step in steps] == [{"length": 4}] * 4
    assert shared == {"numbers": [1, 2, 3]}


def test_wider_scopes_get_all_samples_at_once(pool):
    first, second = pool.score([job(rank(), "a", "b", "c"), job(rank(), "a", "short")])
    assert [verdict.value for verdict in first.verdicts] == [0.0, 1.0, 2.0]
    assert second == JobOutcome(fault="gave 1 verdicts for 2 samples")


def test_workers_import_no_torch(pool):
    names = ["torch", "numpy", "transformers", "hostile_rewards"]
    outcomes = pool.score([job(modules(), name) for name in names])
    assert [value(outcome) for outcome in outcomes] == [0.0, 0.0, 0.0, 1.0]


PASSED = f"deadline of {DEADLINE:g} s passed"
FAULTS = {
    "spin": PASSED,
    "sleep": PASSED,
    "power": PASSED,
    "exit": "process died (exit code 3)",
    "kill": "process died (signal 9)",
    "segfault": "process died (signal 11)",
    "sys_exit": "SystemExit: done",
    "hog": "MemoryError: it may take 256 MiB",
    "nan": "gave nan",
    "infinite": "gave inf",
    "text": "gave str instead of a number",
    "complex": "gave complex instead of a number",
    "reason": "gave int as a reason",
    "parts": "gave nan",
    "explode": "ValueError: no such target",
    "explode_unprintably": "Unprintable: (and RuntimeError when asked why)",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_misdeed_costs_its_own_job(pool, how):
    jobs = [job(misbehave(how=how), "good", deadline=60.0) for _ in range(20)]
    # On a crowded machine, whatever is not meant to miss its deadline may take longer.
    deadline = DEADLINE if FAULTS[how] == PASSED else 60.0
    jobs[7] = job(misbehave(how=how), "bad", deadline=deadline)
    outcomes = pool.score(jobs)
    assert outcomes[7] == JobOutcome(fault=FAULTS[how])
    assert [value(outcome) for i, outcome in enumerate(outcomes) if i != 7] == [1.0] * 19


def test_noise_breaks_nothing(pool):
    outcomes = pool.score([job(misbehave(how="noise"), "bad") for _ in range(3)])
    assert [value(outcome) for outcome in outcomes] == [1.0] * 3


def test_memory_that_one_job_keeps_is_not_held_against_the_next(pool):
    outcomes = pool.score([job(misbehave(how="leak"), "bad") for _ in range(6)])
    assert [value(outcome) for outcome in outcomes] == [1.0] * 6


def test_a_slow_chunk_is_handed_back_and_finished(pool):
    # Each is well within its deadline; all together are not.
    jobs = [job(hostile_rewards.nap(seconds=0.1), "x", deadline=1.2) for _ in range(16)]
    assert [value(outcome) for outcome in pool.score(jobs)] == [1.0] * 16


def test_an_unsendable_reward_costs_its_own_jobs(pool):
    class Local(Reward):
        """Cannot be imported anywhere else."""

        def score(self, sample):
            return 1.0

    outcomes = pool.score([job(Local(), "x"), job(length(), "abc")])
    assert outcomes[0].fault.startswith("cannot be sent to a worker: ")
    assert value(outcomes[1]) == 3.0


@pytest.mark.parametrize(
    ("reward", "fault"), [(Unsendable, "cannot be sent to"), (Unreadable, "cannot be read by")]
)
def test_what_a_reward_raises_while_it_is_sent_can_be_stored(pool, reward, fault):
    outcomes = pool.score([job(reward(), "x"), job(length(), "abc")])
    assert outcomes[0].fault.startswith(f"{fault} a worker: RuntimeError: half \ufffd, NUL ␀x")
    assert len(outcomes[0].fault) < LONGEST_REASON + 100
    assert value(outcomes[1]) == 3.0


def test_a_reward_that_workers_cannot_import_costs_its_own_jobs(pool, monkeypatch):
    # A class that exists here under a module name that no other process can import.
    module = type(sys)("only_here")
    module.Odd = type("Odd", (Abstains,), {"__module__": "only_here", "__annotations__": {}})
    monkeypatch.setitem(sys.modules, "only_here", module)
    outcomes = pool.score([job(module.Odd(), "x"), job(length(), "abc")])
    assert outcomes[0].fault.startswith("cannot be read by a worker: ModuleNotFoundError")
    assert value(outcomes[1]) == 3.0


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


def test_closing_ends_workers_that_are_busy(tmp_path):
    mark = tmp_path / "begun"
    with RewardPool(workers=1, memory_mb=256) as pool:
        pid = int(value(pool.score([job(hostile_rewards.process(), "x")])[0]))
        pool._send(0, [job(hostile_rewards.dwell(), str(mark), deadline=3600.0)], False)
        wait_until("it to be busy", mark.exists)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_ends_the_group_of_a_rank_leaves_its_scores_alone():
    """torchrun asks ranks to stop by a signal to their process groups."""
    code = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from hostile_rewards import nap
from rlx.plugin import Sample
from rlx.reward import RewardJob, RewardPool
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
    sample = Sample(id="a", problem={}, turn="answer", number=1, response="")
    with RewardPool(workers=1, memory_mb=256) as pool:
        pool._send(0, [RewardJob(nap(seconds=1.0), (sample,), 60.0)], False)
        time.sleep(0.3)
        os.killpg(0, signal.SIGTERM)
        print("scored", pool._workers.receive(None)[0].report.fault)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(hostile_rewards.__file__).parent)],
        start_new_session=True,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "asked\nscored None\n"), done.stderr


def test_workers_that_cannot_start_are_a_fault_of_the_environment(monkeypatch):
    monkeypatch.setattr("rlx.reward.workers.keep_workers", hostile_rewards.leave)
    with pytest.raises(EnvironmentFault, match="cannot start: exit code 1"):
        RewardPool(workers=1, memory_mb=256)


@each_row(
    ("keep", "says"),
    [
        ("keep_workers_killed", "are lost again and again (signal 9); is there enough memory?"),
        (
            "keep_workers_whose_children_are_killed",
            "cannot start: process died (signal 9); is there enough memory?",
        ),
    ],
)
def test_workers_that_are_killed_while_they_start_are_started_again(
    keep, says, tmp_path, monkeypatch
):
    """At the beginning, and in place of a keeper that was killed."""
    kills = tmp_path / "kills"
    monkeypatch.setenv("RLX_TEST_KILLS", str(kills))
    monkeypatch.setattr("rlx.reward.workers.keep_workers", getattr(hostile_rewards, keep))
    kills.write_text("3")
    with RewardPool(workers=1, memory_mb=256) as pool:
        assert kills.read_text() == "0"
        assert value(pool.score([job(length(), "abc")])[0]) == 3.0
        keeper = psutil.Process(int(value(pool.score([job(process(), "x")])[0]))).parent()
        kills.write_text("2")
        keeper.kill()
        wait_until("it to be dead", lambda: has_ended(keeper))
        assert value(pool.score([job(length(), "abc")])[0]) == 3.0
    kills.write_text("4")
    with pytest.raises(EnvironmentFault) as caught:
        RewardPool(workers=1, memory_mb=256)
    assert str(caught.value).endswith(says)
