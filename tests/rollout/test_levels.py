"""Schedules as a list of levels: what they sample, and how they show a demonstration."""

from collections import Counter

from rows import each_row

from rlx.plugin import Problem
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.spec import SCHEDULES, TwoTurnRolloutSpec
from rlx.testing.schedules import ByteDialogue, RandomSession

ANSWER = {"kind": "answer", "count": 3, "template": "Q: {prompt}\n", "spans": ["think", "answer"]}
ANALYSIS = {"kind": "analysis", "count": 2, "template": "", "spans": ["analysis"]}
CONFIDENCE = {"kind": "confidence", "count": 2, "template": "", "spans": ["confidence"]}
PROBLEMS = [Problem(id=f"p{n}", prompt=f"{n}", fields={}) for n in range(3)]


def read(*levels):
    return SCHEDULES.validate_section({"schedule": "levels", "levels": list(levels)})


def grow(spec, plan=None):
    plan = plan or build_rollout_plan(spec)
    return sample_rollout_trees(plan, PROBLEMS, (1, 2, 3), RandomSession(), ByteDialogue())


def kinds_on_paths(tree):
    return Counter(
        tuple(tree.segments[s].kind for s in tree.turns(segment))
        for segment in tree.policy_segments
    )


def test_every_turn_is_continued_by_the_next_level():
    for tree in grow(read(ANSWER, ANALYSIS, CONFIDENCE)):
        assert kinds_on_paths(tree) == {
            ("answer",): 3,
            ("answer", "analysis"): 6,
            ("answer", "analysis", "confidence"): 12,
        }
        assert [tree.segments[s].turn for s in tree.turns(tree.policy_segments[-1])] == [1, 2, 3]


def test_two_levels_sample_what_two_turn_samples():
    two = TwoTurnRolloutSpec(
        num_generations_answer=3,
        num_generations_confidence=2,
        answer={k: v for k, v in ANSWER.items() if k in ("template", "spans")},
        confidence={"template": "", "spans": ("confidence",)},
    )
    assert grow(read(ANSWER, CONFIDENCE)) == grow(two)


def test_an_evaluation_has_one_answer_whatever_stands_above_it():
    first = read({**CONFIDENCE, "template": "{prompt}"}, {**ANSWER, "template": ""})
    plan = build_rollout_plan(first)
    assert plan.answer_level == 1 and first.answer_turn == "answer"
    for tree in grow(first, plan.copy_with_sampling(1)):
        assert kinds_on_paths(tree) == {("confidence",): 1, ("confidence", "answer"): 1}
        assert [tree.segments[s].kind for s in plan.list_answers(tree)] == ["answer"]
    for tree in grow(first, plan.copy_with_sampling(5)):
        assert len(plan.list_answers(tree)) == 5
    below = build_rollout_plan(read(ANSWER, ANALYSIS, CONFIDENCE)).copy_with_sampling(1, top_k=1)
    assert [(v.count, v.turn.top_k) for v in below.levels] == [(1, 1), (2, 0), (2, 0)]


def test_rows_and_budgets_count_every_level():
    spec = read(ANSWER, ANALYSIS, {**CONFIDENCE, "max_new_tokens": 6})
    assert spec.rows_per_step == 32 * (3 + 6 + 12)
    assert spec.budgets == {"answer": 256, "analysis": 256, "confidence": 6}
    assert [level.key for level in spec.list_levels()][1] == "rollout.levels.1"
    assert spec.list_levels()[2].count_key == "rollout.levels.2.count"


def test_a_copy_has_other_levels():
    spec = read(ANSWER, CONFIDENCE)
    plan = build_rollout_plan(spec).copy_with_sampling(1, top_k=3)
    again = spec.copy_with_levels(plan.levels)
    assert [(v.count, v.top_k, v.spans) for v in again.levels] == [
        (1, 3, ("think", "answer")),
        (2, 0, ("confidence",)),
    ]


ANSWERED = "<think>2+3\n</think><answer>2+3</answer>"
CHECKED, STATED = "<analysis>5=5</analysis>", "<confidence>0.9</confidence>"
WHOLE = ANSWERED + CHECKED + STATED


@each_row(
    ("levels", "turns", "arranged"),
    [
        ((ANSWER, ANALYSIS, CONFIDENCE), (WHOLE,), (ANSWERED, CHECKED, STATED)),
        ((CONFIDENCE, ANSWER), (WHOLE,), (STATED, ANSWERED)),
        ((ANSWER, CONFIDENCE), ("<answer>2</answer>\n",), None),
        ((ANSWER, CONFIDENCE), ("<answer>2</answer>", STATED), None),
        ((ANSWER, CONFIDENCE), ("two", "half"), None),
        ((ANSWER,), ("<answer>never closed",), None),
    ],
)
def test_blocks_of_a_demonstration_go_to_the_level_that_declares_them(levels, turns, arranged):
    """As they are where no level declares one alone."""
    assert read(*levels).arrange_demonstration(turns) == (arranged or turns)
