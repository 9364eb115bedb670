"""CPU seconds by part of a rank's work, by a clock that the test turns."""

from rlx.run.context import CpuAccount


def test_every_second_is_in_one_part():
    used = [100.0]
    account = CpuAccount(lambda: sum(used))
    used.append(1)
    with account.measure("evaluate"), account.measure("sample"):
        used.append(2)
    assert account.take("evaluate") == {"perf/cpu_evaluate_s": 2}
    for _ in range(2):
        with account.measure("sample"):
            used.append(4)
    used.append(8)
    with account.measure("learn"):
        used.append(16)
    parts = account.take("sample", "score", "learn")
    assert parts == {"perf/cpu_sample_s": 8, "perf/cpu_score_s": 0, "perf/cpu_learn_s": 16}
    assert account.take_rest() == {"perf/cpu_rest_s": 9}
    assert account.take("learn") | account.take_rest() == {
        "perf/cpu_learn_s": 0,
        "perf/cpu_rest_s": 0,
    }
    with account.measure("evaluate"):  # no part of the rest of the next step
        used.append(32)
    used.append(1)
    assert account.take_rest() == {"perf/cpu_rest_s": 1}
