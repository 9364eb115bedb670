"""The urn: what is drawn follows the share that the prompt shows; rewards measure against it."""

import re
from collections import defaultdict

from rows import each_row

from rlx.plugin import Sample, get_confidence_values
from rlx_plugins.urn import UrnPicked, UrnTask

DEMONSTRATION = r"<answer>(\d+)</answer><analysis>(\d+)</analysis><confidence>([\d.]+)</confidence>"


def test_red_is_drawn_as_often_as_the_prompt_says_whichever_ball_is_picked():
    task, found = UrnTask(), defaultdict(list)
    for index in range(6000):
        problem = task.problem("train", index, 7)
        number, red, blue = map(int, problem.prompt.removeprefix("nums: ").split())
        assert (red, blue) == (problem.fields["red"], problem.fields["blue"])
        assert 1 <= number <= 100
        assert red + blue == 10
        assert problem.stratum == f"{red} of 10 red"
        assert len(problem.fields["red_balls"]) == red
        found[red, "drawn"].append(problem.fields["drawn"])
        for ball in ("1", "8"):
            turn = {"turn": "answer", "number": 1, "response": "", "spans": {"answer": ball}}
            sample = Sample(id="a", problem=problem.fields, **turn)
            found[red, ball].append(UrnPicked().score(sample).value)
    assert len(found) == 3 * 11
    for (red, _), outcomes in found.items():
        share, n = red / 10, len(outcomes)
        assert abs(sum(outcomes) / n - share) <= 4.5 * (share * (1 - share) / n) ** 0.5


def test_a_demonstration_states_each_value():
    task = UrnTask(confidence_steps=4)
    texts = {task.demonstration(task.problem("train", i, 0), 0).turns for i in range(200)}
    assert get_confidence_values(task) == ("0.0", "0.25", "0.5", "0.75", "1.0")
    assert texts == {
        (f"<answer>1</answer><confidence>{value}</confidence>",) for value in task.confidence_values
    }


@each_row(("hint", "stated"), [("share", 0.7), ("square", 0.5)])
def test_a_demonstration_picks_counts_and_follows_its_hint(hint, stated):
    task = UrnTask(picks=True, counts=True, informed=1.0, hint=hint)
    problems = (task.problem("train", i, 0) for i in range(200))
    texts = [task.demonstration(p, 0).turns[0] for p in problems if p.fields["red"] == 7]
    found = [re.fullmatch(DEMONSTRATION, text) for text in texts]
    assert {one[2] for one in found} == {"7"}
    assert {one[3] for one in found} == {str(stated)}
    assert len({one[1] for one in found}) > 5, "any ball"
