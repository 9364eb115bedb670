"""Where a step lies among the phases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.spec import ExperimentSpec

BASE = {
    "name": "place",
    "model": {"kind": "tiny"},
    "task": {"plugin": "countdown"},
    "rollout": {"schedule": "single"},
    "rewards": {"turn": {"accuracy": {"plugin": "countdown.verify", "turn": "answer"}}},
}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_a_step_is_the_last_of_its_phase_before_it_is_of_the_next(lengths, data):
    phases = [{"name": str(n), "steps": steps} for n, steps in enumerate(lengths)]
    spec = ExperimentSpec.model_validate({**BASE, "phases": phases})
    step = data.draw(st.integers(0, sum(lengths)))
    number, done = spec.place(step)
    assert sum(lengths[:number]) + done == step
    assert (done > 0 or step == 0) and done <= lengths[number]
    with pytest.raises(ValueError, match="no step"):
        spec.place(sum(lengths) + 1)
