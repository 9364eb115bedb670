"""What every pool of workers promises: `from pool_promises import *`, with a fixture `pool`.

Its workers may take 256 MiB for a job, and find the folder of the tests on their path.
"""

import sys

import hostile_rewards
import pytest
from hostile_rewards import (
    Abstains,
    Grows,
    Unreadable,
    Unsendable,
    graded,
    grow,
    length,
    misbehave,
    modules,
    rank,
    reorder,
)

from rlx.plugin import Action, Reward, Sample, Score
from rlx.reward import JobOutcome, PooledHost, RewardJob
from rlx.reward.worker import LONGEST_REASON
from rlx_plugins.countdown import CountdownVerify

DEADLINE = 0.4


def sample(response, id="a", **problem):
    return Sample(id=id, problem=problem, turn="answer", number=1, response=response)


def job(reward, *responses, deadline=5.0):
    return RewardJob(reward, tuple(map(sample, responses)), deadline)


def value(outcome):
    (verdict,) = outcome.verdicts
    return verdict.value


# Verdicts ----------------------------------------------------------------------------------------


def test_verdicts_come_back_in_order(pool):
    outcomes = pool.score([job(length(), "x" * n) for n in range(300)])
    assert [value(outcome) for outcome in outcomes] == list(range(300))


def test_nothing_to_do(pool):
    assert pool.score([]) == []


def test_scores_are_carried_whole(pool):
    (outcome,) = pool.score([job(graded(reason="half"), "abc")])
    assert outcome == JobOutcome((Score(0.5, "half", {"length": 3.0}),))


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
    samples = [
        Sample(id=name, problem=shared, turn="answer", number=1, response="x") for name in "abcd"
    ]
    outcomes = pool.score([RewardJob(grow(), (one,), 5.0) for one in samples])
    assert [value(outcome) for outcome in outcomes] == [4.0] * 4
    host = PooledHost(Grows(), pool, 5.0)
    assert host.reset([(shared, seed) for seed in range(4)]) == [[1, 2, 3, 0]] * 4
    steps = host.step([(shared["numbers"], Action(text="x"))] * 4)
    assert [step.info for step in steps] == [{"length": 4}] * 4
    assert shared == {"numbers": [1, 2, 3]}


def test_a_watched_reward_says_what_it_changed(pool):
    several = (sample("a", id="a", numbers=[1]), sample("b", id="b", numbers=[1]))
    jobs = [
        RewardJob(grow(), several[:1], 5.0, is_watched=True),
        RewardJob(reorder(), several, 5.0, is_watched=True),
        RewardJob(length(), several[:1], 5.0, is_watched=True),
        RewardJob(grow(), several[:1], 5.0),
    ]
    assert [outcome.changed for outcome in pool.score(jobs)] == [
        ("problem.numbers",),
        ("sample 0: id", "sample 0: response", "sample 1: id", "sample 1: response"),
        (),
        (),
    ]


def test_a_reward_may_abstain(pool):
    assert pool.score([job(Abstains(), "x")]) == [JobOutcome((None,))]


def test_wider_scopes_get_all_samples_at_once(pool):
    first, second = pool.score([job(rank(), "a", "b", "c"), job(rank(), "a", "short")])
    assert [verdict.value for verdict in first.verdicts] == [0.0, 1.0, 2.0]
    assert second == JobOutcome(fault="gave 1 verdicts for 2 samples")


def test_shipped_rewards_run_in_workers(pool):
    good = sample("<answer>1+2</answer>", numbers=[1, 2], target=3)
    bad = sample("<answer>1+2</answer>", numbers=["1", "2"], target=3)
    first, second = pool.score([RewardJob(CountdownVerify(), (s,), 5.0) for s in (good, bad)])
    assert value(first) == 1.0
    assert second.fault.startswith("ValueError: numbers must be a list of finite numbers")


def test_workers_import_no_torch(pool):
    names = ["torch", "numpy", "transformers", "hostile_rewards"]
    outcomes = pool.score([job(modules(), name) for name in names])
    assert [value(outcome) for outcome in outcomes] == [0.0, 0.0, 0.0, 1.0]


# Misdeeds: each costs its own verdict, and no other ----------------------------------------------

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


def test_all_misdeeds_have_a_test():
    stored = {"half_reason", "long_reason", "half_part", "half_fault"}
    assert set(FAULTS) | stored | {"noise", "leak", "fork"} == set(hostile_rewards.MISDEEDS)


@pytest.mark.parametrize("how", FAULTS)
def test_a_misdeed_costs_its_own_job(pool, how):
    jobs = [job(misbehave(how=how), "good", deadline=60.0) for _ in range(20)]
    # On a crowded machine, whatever is not meant to miss its deadline may take longer.
    deadline = DEADLINE if FAULTS[how] == PASSED else 60.0
    jobs[7] = job(misbehave(how=how), "bad", deadline=deadline)
    outcomes = pool.score(jobs)
    assert outcomes[7] == JobOutcome(fault=FAULTS[how])
    assert [value(outcome) for i, outcome in enumerate(outcomes) if i != 7] == [1.0] * 19


def test_several_misdeeds_at_once(pool):
    hows = ["kill", "spin", "nan", "exit", "explode"]
    jobs = [
        job(misbehave(how=how), "bad", deadline=DEADLINE if how == "spin" else 60.0) for how in hows
    ]
    jobs = [j for bad in jobs for j in (bad, job(length(), "four"))]
    outcomes = pool.score(jobs)
    assert [outcome.fault for outcome in outcomes[::2]] == [FAULTS[how] for how in hows]
    assert [value(outcome) for outcome in outcomes[1::2]] == [4.0] * 5


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
