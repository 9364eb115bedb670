import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rows import each_row

import rlx.plugin
from rlx.testing.tasks import check_task
from rlx_plugins.countdown import CountdownTask, compute_score, evaluate_equation
from rlx_plugins.countdown.search import Rules, find_solutions, random_expression
from rlx_plugins.countdown.task import is_held_out
from rlx_plugins.rlcr import matches_pattern

RECIPE = CountdownTask(
    numbers={2: 0.7, 3: 0.3}, number_range=(1, 20), target_range=(1, 99), operators="+-*"
)
TOKENIZER = Path(rlx.plugin.__file__).parents[1] / "model" / "tokenizers" / "arithmetic.json"
ANY = Rules("+-*/", -(10**20), 10**20)
STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


def check_trace(steps, numbers, low, high):
    """Works the steps out from the numbers; returns what is left at the end."""
    have = Counter(numbers)
    for step in steps:
        left, operator, right, value = STEP.fullmatch(step).groups()
        for operand in (int(left), int(right)):
            assert have[operand] > 0
            have[operand] -= 1
        assert evaluate_equation(f"{left}{operator}{right}") == int(value)
        assert low <= int(value) <= high
        have[int(value)] += 1
    return list(have.elements())


# Problems ----------------------------------------------------------------------------------------


@each_row("split", ["train", "test"])
@each_row("task", [RECIPE, CountdownTask()], ids=["recipe", "default"])
def test_problems_keep_their_promises(task, split):
    low, high = (0, 100) if task is RECIPE else (0, 999)
    for index in range(150):
        problem = task.problem(split, index, seed=3)
        numbers, target = problem.fields["numbers"], problem.fields["target"]
        assert problem.fields["data_source"] == "countdown"
        assert problem.stratum == f"{len(numbers)} numbers"
        assert problem.prompt == f"nums: {' '.join(map(str, numbers))}\ntarget: {target}\n"
        assert all(task.number_range[0] <= n <= task.number_range[1] for n in numbers)
        assert task.target_range[0] <= target <= task.target_range[1]
        assert is_held_out(numbers, target, 7) == (split == "test")
        assert check_trace(problem.fields["steps"], numbers, low, high) == [target]
        answer = f"<answer>{problem.fields['solution']}</answer>"
        assert compute_score(answer, problem.fields, ops="prompt") == 1.0
        if len(numbers) <= 3:
            assert problem.fields["solutions"] >= 1
        json.dumps(problem.fields)


def test_an_empty_split_is_an_error():
    task = CountdownTask(numbers=[1], number_range=(5, 5), target_range=(5, 5))
    splits = ["train", "test"]
    empty = splits[not is_held_out([5], 5, 7)]
    with pytest.raises(ValueError, match=f"found no {empty} problem"):
        task.problem(empty, 0, 0)


@each_row(
    ("options", "message"),
    [
        ({"numbers": []}, "at least one number"),
        ({"numbers": [0, 2]}, "at least one number"),
        ({"numbers": {2: -1.0, 3: 2.0}}, "weights"),
        ({"operators": "+^"}, "some of"),
        ({"operators": ""}, "some of"),
        ({"number_range": (9, 1)}, "greater"),
        ({"target_range": (9, 1)}, "greater"),
        ({"number_range": (-3, 9)}, "below 0"),
        ({"held_out": 1}, "held_out"),
        ({"prompt": "nums: {numbers}"}, "target"),
        ({"prompt": "{numbers} {target} {solution}"}, "no other"),
        ({"demonstrations": {"correct": 1.5}}, "correct"),
        ({"files": {"train": {"path": "a.jsonl"}}, "numbers": [2]}, "numbers: has no effect with"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        CountdownTask(**options)


# Demonstrations ----------------------------------------------------------------------------------


def with_demonstrations(task, **options):
    shown = CountdownTask(demonstrations=options).demonstrations
    return task.model_copy(update={"demonstrations": shown})


EPISODE = re.compile(r"<think>((?:[^\n<]+\n)+)</think><answer>([-+*/()0-9]+)</answer>")


def test_demonstrations_are_worked_rightly_and_often_miss_the_target():
    scores, confidences = [], []
    for index in range(600):
        problem = RECIPE.problem("train", index, 0)
        answer, *rest = RECIPE.demonstration(problem, index).turns
        trace, expression = EPISODE.fullmatch(answer).groups()
        (value,) = check_trace(trace.splitlines(), problem.fields["numbers"], 0, 100)
        assert evaluate_equation(expression) == value
        scores.append(compute_score(answer, problem.fields))
        assert scores[-1] == (1.0 if value == problem.fields["target"] else 0.1)
        confidences += rest
    assert 0.4 < scores.count(1.0) / 600 < 0.7  # 40 %, and the random ones that happen to hit
    assert 0.42 < len(confidences) / 600 < 0.58
    assert set(confidences) == {f"<confidence>{k / 10:.1f}</confidence>" for k in range(11)}
    assert max(Counter(confidences).values()) < 2.2 * len(confidences) / 11


def test_fixed_demonstrations_stay_what_they_are():
    # The results of earlier versions depend on them.
    turns = [RECIPE.demonstration(RECIPE.problem("train", i, 0), i).turns for i in range(200)]
    assert turns[1] == (
        "<think>9-6=3\n3*4=12\n</think><answer>(9-6)*4</answer>",
        "<confidence>0.6</confidence>",
    )
    digest = hashlib.sha256(json.dumps(turns).encode()).hexdigest()
    assert digest[:16] == "6ff2608a971c0541"


SEQUENCE = re.compile(
    r"(<think>.*</think><answer>(.*)</answer>)"
    r"<analysis>(-?\d+)=(\d+)</analysis><confidence>(.*)</confidence>",
    re.DOTALL,
)


def test_a_sequence_holds_answer_analysis_and_confidence_always():
    task = with_demonstrations(RECIPE, form="sequence", informed=1.0, confidence=0.0)
    turns = with_demonstrations(RECIPE, informed=1.0, confidence=1.0)
    known = set(json.loads(TOKENIZER.read_text())["model"]["vocab"])
    for index in range(200):
        problem = task.problem("train", index, 0)
        (text,) = task.demonstration(problem, index).turns
        assert matches_pattern("tabc", text)
        answer, expression, value, target, confidence = SEQUENCE.fullmatch(text).groups()
        assert evaluate_equation(expression) == int(value)
        assert int(target) == problem.fields["target"]
        right = value == target
        assert compute_score(text, problem.fields) == compute_score(answer, problem.fields)
        assert compute_score(text, problem.fields) == (1.0 if right else 0.1)
        assert (float(confidence) > 0.5) == right
        pieces = re.findall(r"</?[a-z]+>|\d\.\d|\d+|.", text, re.DOTALL)
        assert set(pieces) <= known
        assert turns.demonstration(problem, index).turns[0] == answer


def test_a_check_that_judges_says_where_value_and_target_differ():
    restating = with_demonstrations(RECIPE, form="sequence")
    judging = with_demonstrations(RECIPE, form="sequence", check="judge")
    for index in range(200):
        problem = RECIPE.problem("train", index, 0)
        (plain,) = restating.demonstration(problem, index).turns
        (judged,) = judging.demonstration(problem, index).turns
        value, target = SEQUENCE.fullmatch(plain).group(3, 4)
        sign = "=" if value == target else "!="
        assert judged == plain.replace(f"<analysis>{value}=", f"<analysis>{value}{sign}")
        assert matches_pattern("tabc", judged)


# Probes ------------------------------------------------------------------------------------------


def test_corruptions_differ_by_seed_and_stay_near():
    made = {RECIPE.corruption("5*3=15\n", seed) for seed in range(200)}
    assert made == {f"5*3={n}\n" for n in range(6, 25) if n != 15}
    assert {RECIPE.corruption("=99100", seed) for seed in range(200)} == {
        f"={n}" for n in range(91, 101)
    }
    assert RECIPE.corruption("no number", 0) is None


@each_row(
    ("one", "other", "same"),
    [
        ("3+4*2", "(2*4) + 3", True),
        ("3-4", "4-3", False),
        ("2*6", "3*4", False),  # equal, but not by algebra
        ("6/3/2", "6/(3*2)", True),
        ("7", "07", False),
        ("3 +", "3+", True),
        ("1/(2-2)", "3/(2-2)", False),
    ],
)
def test_answers_are_the_same_when_algebra_says_so(one, other, same):
    assert (RECIPE.canonical(one) == RECIPE.canonical(other)) == same


def test_an_answer_of_thousands_of_digits_has_a_form():
    products = ["22"]
    for _ in range(9):
        products.append(f"({products[-1]})*({products[-1]})")
    long = f"({products[9]})*({products[8]})"  # more digits than Python writes
    assert RECIPE.canonical(long) == RECIPE.canonical(f"({products[8]})*({products[9]})")
    assert RECIPE.canonical(long) != RECIPE.canonical(products[9])
    assert "(" not in RECIPE.canonical(long), "it was computed"


# Expressions -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(0, 10**6))
def test_expressions_are_what_their_steps_say(numbers, seed):
    worked = random_expression(numbers, ANY, random.Random(seed), trivial=True)
    if worked is None:
        return
    assert evaluate_equation(worked.text, numeric="exact") == worked.value
    assert sorted(map(int, re.findall(r"\d+", worked.text))) == sorted(numbers)
    assert len(worked.steps) == len(numbers) - 1


@each_row(
    ("numbers", "target", "texts"),
    [
        ([2, 3, 4], 14, {"3*4+2", "(3+4)*2"}),
        ([2, 6, 9], 5, {"9-(6-2)", "2+9-6", "9-6+2"}),
        ([2, 4, 8], 4, {"2*8/4", "8/4*2", "8/(4/2)", "8/4+2", "8/(4-2)"}),
        ([2, 4, 8], 1, {"8/(2*4)", "8/2/4", "8/4/2", "2*4/8", "2/(8/4)", "4/(8/2)"}),
    ],
)
def test_parentheses_only_where_needed(numbers, target, texts):
    found = {worked.text for worked in find_solutions(numbers, target, Rules("+-*/", 0, 100))}
    assert found == texts


# Files -------------------------------------------------------------------------------------------


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def from_file(tmp_path, *lines, **options):
    return CountdownTask(files={"train": {"path": write(tmp_path / "a.jsonl", *lines)}}, **options)


def test_problems_from_files(tmp_path):
    rows = [json.dumps({"nums": [n, 2], "target": n + 2}) for n in range(3, 33)]
    task = from_file(tmp_path, *rows, "", '{"numbers": [1, 2.0], "target": 3.0}', held_out=2)
    count = len(task._read_files().train)
    passes = [[task.problem("train", count * p + i, 0) for i in range(count)] for p in (0, 1)]
    first, second = ([problem.id for problem in one] for one in passes)
    assert sorted(first) == sorted(second) and len(set(first)) == count and first != second
    tests = [task.problem("test", i, 0).prompt for i in range(31 - count)]
    assert "nums: 1 2\ntarget: 3\n" in [*tests, *(problem.prompt for problem in passes[0])]
    always = with_demonstrations(task, correct=1)
    for index in range(10):
        problem = always.problem("train", index, 0)
        turns = always.demonstration(problem, index).turns
        assert compute_score(turns[0], problem.fields) == 1.0


@each_row(
    ("line", "message"),
    [
        ("{}", r"line 2: there is no field nums \(or numbers\); there are no fields"),
        ('{"n": [1]}', r"line 2: there is no field nums \(or numbers\); there are 'n'"),
        ('{"nums": ["1", "2"], "target": 3}', "line 2: nums must be a list of whole"),
        ('{"nums": "1 2", "target": 3}', "line 2: nums must be a list of whole"),
        ('{"nums": [true, 2], "target": 3}', "line 2: nums must be a list of whole"),
        ('{"nums": [1, 2]}', "line 2: there is no field target; there are 'nums'"),
        (f'{{"nums": [{"1" * 5000}], "target": 3}}', "line 2: not JSON"),
        ('{"nums": [1, 2], "target": "3"}', "line 2: target must be"),
        ('{"nums": [1, 2], "target": NaN}', "line 2: target must be"),
        ('{"nums": [], "target": 3}', "line 2: nums must be a list of whole"),
        ('{"numbers": [-1, 2], "target": 3}', "line 2: numbers must be a list of whole"),
        ('{"nums": [1.5, 2], "target": 3}', "line 2: nums must be a list of whole"),
    ],
)
def test_malformed_files_are_named_with_the_line(tmp_path, line, message):
    task = from_file(tmp_path, '{"nums": [7, 7], "target": 14}', line)
    with pytest.raises(ValueError, match=rf"a\.jsonl {message}"):
        task.problem("train", 0, 0)


HUB = [
    {"target": a + b + c, "nums": [a, b, c]} for a in range(1, 9) for b in (2, 5) for c in (3, 7)
]
"""Rows of the shape of Jiayi-Pan/Countdown-Tasks-3to4."""


def test_parquet_of_the_hub_is_split_by_the_rule_of_generated_problems(tmp_path):
    train = parquet(tmp_path / "train.parquet", HUB)
    task = CountdownTask(files={"train": {"path": train}}, held_out=3)
    tested = [(r["nums"], r["target"]) for r in HUB if is_held_out(r["nums"], r["target"], 3)]
    assert 0 < len(tested) < len(HUB)
    asked = [task.problem("test", i, 0).fields for i in range(len(tested))]
    assert [(f["numbers"], f["target"]) for f in asked] == tested
    trained = [task.problem("train", i, 0).fields for i in range(len(HUB) - len(tested))]
    assert not any(is_held_out(f["numbers"], f["target"], 3) for f in trained)
    check_task(task)


def test_probes_spoil_files_within_the_range_of_their_numbers(tmp_path):
    train = parquet(tmp_path / "a.parquet", [{"target": 5484, "nums": [1455, 1961, 2068]}, *HUB])
    task = CountdownTask(files={"train": {"path": train}})
    made = {task.corruption("1455+1961=3416\n", seed) for seed in range(200)}
    assert made == {f"1455+1961={n}\n" for n in range(3407, 3426) if n != 3416}
    assert {task.corruption("=9999", seed) for seed in range(200)} == {
        f"={n}" for n in range(5475, 5485)
    }


def test_empty_files_are_errors(tmp_path):
    task = from_file(tmp_path, "")
    for look in (task.check, lambda: task.problem("test", 0, 0)):
        with pytest.raises(ValueError, match="no problem is left"):
            look()
