"""When the alarm of over-querying goes off, and what it says."""

from rows import each_row

from rlx.run.metrics import AlarmWatch, find_no_gradient, find_over_querying
from rlx.spec import SingleRolloutSpec


def steps(turns, duplicates=None):
    shares = duplicates or [None] * len(turns)
    return [
        {"environment/turns": t} | ({} if d is None else {"environment/info/duplicate": d})
        for t, d in zip(turns, shares, strict=True)
    ]


RISING = [2.5, 2.5, 2.5, 3.0, 3.5, 3.6, 3.7]
FULL = [3.5, 3.6, 3.5]


@each_row(
    ("history", "goes_off"),
    [
        (steps(RISING), True),
        (steps(RISING[:-1]), False),  # two steps of many turns
        (steps([*RISING, 3.0]), False),  # it was over
        (steps(FULL, [0.1, 0.2, 0.3]), True),
        (steps(FULL, [0.1, 0.09, 0.3]), False),
        (steps(FULL), False),  # many turns from the first step on, and no repeats
        (steps([2.9] * 9, [0.5] * 9), False),  # repeats, but turns are not used up
        (steps(FULL[:2], [0.5, 0.5]), False),
        ([{}, *steps(FULL, [0.5] * 3), {}], True),  # steps that could not be scored say nothing
        ([], False),
    ],
)
def test_it_goes_off_when_many_turns_last(history, goes_off):
    assert (find_over_querying(history, 4, "duplicate") is not None) == goes_off


IDLE = {"rollout/zero_signal_answer": 1.0, "rollout/zero_signal_confidence": 1.0}
LEARNS = {"rollout/zero_signal_answer": 0.9, "train/grad_norm": 0.1}
BONUS = {**IDLE, "train/grad_norm": 0.2}
LEADS = {"rollout/zero_signal_answer": 0.9}


@each_row(
    ("history", "goes_off"),
    [
        ([IDLE] * 5, True),
        ([LEARNS, *[IDLE] * 4, {}], True),  # a step that could not be scored
        ([IDLE] * 4, False),
        ([*[IDLE] * 5, LEARNS], False),
        ([*[IDLE] * 4, BONUS], False),  # an entropy bonus needs no advantage
        ([*[IDLE] * 4, LEADS], False),  # the critic leads: the policy has a signal, and waits
    ],
)
def test_steps_without_a_gradient(history, goes_off):
    assert (find_no_gradient(9, history) is not None) == goes_off


def test_each_stretch_without_a_gradient_is_recorded_once():
    events = []

    class Kept:
        def announce(self, kind, message):
            events.append((kind, message.split(" changed")[0]))

    watch = AlarmWatch(SingleRolloutSpec(), None)
    for step, figures in enumerate([*[IDLE] * 7, LEARNS, *[IDLE] * 6], 1):
        watch.observe_step(step, figures, Kept())
    first, second = (f"no gradient: steps {steps}" for steps in ("1 to 5", "9 to 13"))
    assert events == [("no_gradient", m) for m in (first, second)]
