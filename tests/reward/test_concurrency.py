"""Rewards that wait: many calls at a time in one worker, and answers that a run remembers."""

import pytest
from waiting_rewards import Asks, Meets, MeetsOnThreads, Waits

from rlx.plugin import Sample, Score, sum_costs
from rlx.plugin.answer_cache import AnswerFile
from rlx.reward import RewardJob, RewardPool


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=2, memory_mb=1024) as pool:
        yield pool


def jobs(reward, *responses, deadline=60.0):
    samples = (Sample(id="a", problem={}, turn="answer", number=1, response=r) for r in responses)
    return [RewardJob(reward, (sample,), deadline) for sample in samples]


def show(outcomes):
    return [
        o.fault if o.fault is not None else o.verdicts[0] and o.verdicts[0].value for o in outcomes
    ]


def test_as_many_calls_wait_together_as_the_reward_says(pool):
    assert show(pool.score(jobs(Meets(), *["meets"] * 40))) == [4.0] * 40


def test_calls_that_are_not_async_have_a_thread_each(pool):
    assert show(pool.score(jobs(MeetsOnThreads(), *["meets"] * 9))) == [1.0] * 9


def test_what_one_call_does_wrong_is_its_own_fault(pool):
    responses = ["a", "raises", "bb", "hangs", "abstains", "ccc"]
    outcomes = show(pool.score(jobs(Meets(), *responses, deadline=0.5)))
    assert outcomes.pop(1).endswith("LookupError: nobody there")
    assert outcomes == [1.0, 2.0, "deadline of 0.5 s passed", None, 3.0]


def test_a_call_that_stops_all_others_is_found(pool):
    for word, fault in (
        ("blocks", "deadline of 0.3 s passed"),
        ("dies", "process died (exit code 3)"),
    ):
        responses = ["a"] * 5 + [word] + ["bb"] * 9
        wanted = [1.0] * 5 + [fault] + [2.0] * 9
        assert show(pool.score(jobs(Meets(), *responses, deadline=0.3))) == wanted


def test_a_thread_that_never_ends_ends_with_its_process(pool):
    responses = ["hangs", *["leaves"] * 6]
    wanted = ["deadline of 0.5 s passed", *[1.0] * 6]
    assert show(pool.score(jobs(MeetsOnThreads(), *responses, deadline=0.5))) == wanted
    assert show(pool.score(jobs(MeetsOnThreads(), *["meets"] * 3))) == [1.0] * 3


def test_an_async_reward_needs_no_concurrency(pool):
    (outcome,) = pool.score(jobs(Waits(), "x"))
    assert outcome.verdicts == (Score(0.5, "waited"),)


def test_nobody_is_asked_the_same_twice_in_a_run(tmp_path):
    reward, answers = Asks(server=tmp_path / "server"), tmp_path / "answers" / "0.db"
    with RewardPool(1, 256, answers) as pool:
        first = show(pool.score(jobs(reward, "a", "b", "a", "a", "fails")))
        assert first[0] == first[2] == first[3]
        assert sorted(reward.server.read_text().split()) == ["a", "b", "fails"]
        assert first[4].endswith("ConnectionError: no answer")
    with RewardPool(1, 256, answers.with_name("1.db")) as pool:  # of another rank, after a kill
        again = show(pool.score(jobs(reward, "b", "a", "fails", "c")))
    assert again[:2] == [first[1], first[0]]
    assert sorted(reward.server.read_text().split()) == ["a", "b", "c", "fails", "fails"]


def test_costs_of_answers_are_added_up(tmp_path):
    assert sum_costs(tmp_path / "none") == 0.0
    for name, costs in (("0", (1.5, None)), ("1", (0.25, 0.25))):
        file = AnswerFile(tmp_path / f"{name}.db")
        for number, cost in enumerate(costs):
            file.keep(str(number), {"value": 1} if cost is None else {"value": 1, "cost": cost})
        file.close()
    assert sum_costs(tmp_path) == 2.0


def test_without_a_run_nothing_is_kept(tmp_path):
    reward = Asks(server=tmp_path / "server")
    with RewardPool(1, 256) as pool:
        assert show(pool.score(jobs(reward, "a", "a"))) == [1.0, 1.0]
        assert show(pool.score(jobs(reward, "a"))) == [2.0]
    assert [path.name for path in tmp_path.iterdir()] == ["server"]
