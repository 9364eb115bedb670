"""CPU seconds by part of a rank's work, by a clock that the test turns."""

from rlx.run.context import CpuAccount


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def use(self, seconds):
        self.seconds += seconds


def test_every_second_is_in_one_part():
    clock = Clock()
    account = CpuAccount(lambda: clock.seconds)
    clock.use(1)
    with account.measure("evaluate"), account.measure("sample"):
        clock.use(2)
    assert account.take("evaluate") == {"perf/cpu_evaluate_s": 2}
    for _ in range(2):
        with account.measure("sample"):
            clock.use(4)
    clock.use(8)
    with account.measure("learn"):
        clock.use(16)
    parts = account.take("sample", "score", "learn")
    assert parts == {"perf/cpu_sample_s": 8, "perf/cpu_score_s": 0, "perf/cpu_learn_s": 16}
    assert account.take_rest() == {"perf/cpu_rest_s": 9}
    assert account.take("learn") | account.take_rest() == {
        "perf/cpu_learn_s": 0,
        "perf/cpu_rest_s": 0,
    }


def test_an_evaluation_is_no_part_of_the_rest_of_the_next_step():
    clock = Clock()
    account = CpuAccount(lambda: clock.seconds)
    with account.measure("evaluate"):
        clock.use(32)
    clock.use(1)
    assert account.take_rest() == {"perf/cpu_rest_s": 1}
