"""The task `kg`: the promises of every task, its splits, and what its options do."""

import hashlib
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from rows import each_row

from rlx_plugins.kg.questions import TYPES
from rlx_plugins.kg.task import KgQuestionFiles, KgTask

TASK = KgTask()


def test_fixed_problems_and_episodes_stay_what_they_are():
    # Runs made by earlier versions are compared on these.
    assert TASK.problem("train", 1, 0).id == "kg/0/name a country whose capital is Helsinki"
    digests = []
    for world in (0, 5):
        task = KgTask(world=world, types=dict.fromkeys(TYPES, 1.0))
        asked = [(task.problem(split, i, 3), i) for split in ("train", "test") for i in range(150)]
        asked += [(task.lesson(i, 1), i) for i in range(12_700, 13_000)]
        told = [(p.id, p.prompt, p.fields, task.demonstration(p, i).turns) for p, i in asked]
        digests.append(hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16])
    assert digests == ["f522fad49c49b5ec", "13e344e3ba0a7dd6"]


def test_problems_do_not_repeat_before_they_must_and_types_have_their_shares():
    train = [TASK.problem("train", i, 0) for i in range(1000)]
    assert Counter(p.stratum for p in train) == {t: 1000 * w for t, w in TASK.types.items()}
    assert len({p.id for p in train}) == 1000
    test = [TASK.problem("test", i, 0) for i in range(400)]
    assert len({p.id for p in test}) > 390
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert [TASK.problem("train", i, 1).id for i in range(20)] != [p.id for p in train[:20]]


def test_counts_have_a_number_and_evidence():
    task = KgTask(types={"count": 1.0})
    for index in range(50):
        fields = task.problem("train", index, 0).fields
        assert fields["answers"] == [[str(len(fields["evidence"]))]]
        assert not fields["any_of"]


def test_every_answer_can_be_asked_for():
    task = KgTask(answers="every")
    problems = [task.problem("train", i, 0) for i in range(200)]
    assert all(p.prompt.startswith("list every ") and not p.fields["any_of"] for p in problems)
    assert any(len(p.fields["answers"]) > 1 for p in problems)


def test_lessons_are_easy_at_first_and_in_worlds_of_their_own(monkeypatch):
    monkeypatch.setattr("rlx_plugins.kg.task._EASY_LESSONS", 200)
    monkeypatch.setattr("rlx_plugins.kg.task._LESSON_WORLDS", 20)
    task = KgTask()
    easy = [task.lesson(i, 0) for i in range(200)]
    assert {p.stratum for p in easy} == {"forward", "inverse"}
    assert {p.fields["mode"] for p in easy} == {"good"}
    later = [task.lesson(i, 0) for i in range(200, 600)]
    assert {p.stratum for p in later} == set(task.types)
    assert not any("mode" in p.fields for p in later)
    assert {p.fields["world"] for p in easy + later} == set(range(1, 21))
    assert {(p.fields["split"], p.fields["hide"]) for p in easy + later} == {("train", 0.15)}
    assert [task.lesson(i, 0) for i in (5, 300)] == [easy[5], later[100]]
    assert task.lesson(5, 1) != easy[5]


@each_row(
    ("options", "message"),
    [
        ({"types": {}}, "types"),
        ({"types": {"forward": 0.0}}, "above 0"),
        ({"types": {"hop9": 1.0}}, "hop9"),
        ({"held_out": 0.0}, "held_out"),
        ({"files": {"train": "a", "test": "b"}, "held_out": 0.2}, "held_out: has no effect"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        KgTask(**options)


def row(number, question, answers=("Bob",)):
    return {
        "id": f"q{number}",
        "question": question,
        "answer": list(answers),
        "q_entity": ["Ada"],
        "a_entity": list(answers),
        "graph": [["Ada", "knows", "Bob"], ["Ada", "knows", "Cid"]],
    }


def written(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_questions_from_files_bring_their_graphs(tmp_path):
    rows = [row(0, "whom does Ada know"), row(1, "who is it"), row(2, "nobody", ())]
    train = written(tmp_path / "train.jsonl", rows)
    test = written(tmp_path / "test.jsonl", [row(9, "who is it", ("Bob", "Cid"))])
    task = KgTask(files=KgQuestionFiles(train=train, test=test))
    task.check()
    assert {task.problem("train", i, 0).prompt for i in range(10)} == {"whom does Ada know"}
    problem = task.problem("test", 3, 0)
    assert (problem.id, problem.prompt) == ("kg/q9", "who is it")
    assert problem.fields["answers"] == [["Bob"], ["Cid"]]
    assert problem.fields["triples"] == [["Ada", "knows", "Bob"], ["Ada", "knows", "Cid"]]
    assert not task.demonstrates
    with pytest.raises(NotImplementedError):
        task.lesson(0, 0)
    with pytest.raises(NotImplementedError):
        task.demonstration(problem, 0)


def test_a_question_file_that_changes_is_read_again(tmp_path):
    train, test = (written(tmp_path / f"{s}.jsonl", [row(0, s, ["Bob"])]) for s in ("a", "b"))
    task = KgTask(files=KgQuestionFiles(train=train, test=test))
    with pytest.raises(ValueError, match=r"a\.jsonl: holds no question"):
        task.check()  # both have the same id
    written(train, [row(1, "another")])
    assert task.problem("train", 0, 0).prompt == "another"


def test_a_prompt_may_show_the_entities_of_a_question(tmp_path):
    same = row(8, "who is it") | {"q_entity": ["Someone else"]}
    train = written(tmp_path / "train.jsonl", [row(0, "whom does Ada know"), same])
    test = written(tmp_path / "test.jsonl", [row(9, "who is it") | {"q_entity": ["A, B", "</x>"]}])
    files = KgQuestionFiles(train=train, test=test)
    task = KgTask(files=files, prompt="{question}\n({entities})")
    assert task.problem("test", 0, 0).prompt == 'who is it\n("A, B", "‹/x›")'
    prompts = {task.problem("train", i, 0).prompt for i in range(9)}
    assert prompts == {'whom does Ada know\n("Ada")'}, "the other is also in the test file"
    plain = KgTask(files=files).problem("test", 0, 0)
    assert (plain.prompt, plain.fields) == ("who is it", task.problem("test", 0, 0).fields)


@each_row(
    ("changes", "message"),
    [
        ({"graph": [["a", "b"]]}, "expected a fact of three parts, got ['a', 'b']"),
        ({"graph": [["a", "b", ""]]}, "expected visible text as an object"),
        ({"graph": [["a", "\u200b", "b"]]}, "expected visible text as a relation"),
        ({"answer": ["\u200b"]}, "visible text as an answer, got"),
        ({"answer": ["a\ud83d"]}, "expected visible text as an answer"),
        ({"answer": "Jaxon"}, "expected a list as answer, got 'Jaxon'"),
        ({"question": None}, "expected visible text as question"),
    ],
)
def test_malformed_questions_are_refused_by_place(tmp_path, changes, message):
    path = written(tmp_path / "a.jsonl", [row(0, "who"), row(1, "what") | changes])
    with pytest.raises(ValueError) as caught:
        KgTask(files=KgQuestionFiles(train=path, test=path)).check()
    assert str(caught.value).startswith(f"{path} line 2: ") and message in str(caught.value)


def test_the_records_belong_to_the_data_and_a_repeated_answer_is_one(tmp_path):
    jsonl = written(tmp_path / "a.jsonl", [row(0, "who", ("b", "c", "b"))])
    pq.write_table(pa.Table.from_pylist([row(1, "what")]), tmp_path / "b.parquet")
    task = KgTask(files=KgQuestionFiles(train=jsonl, test=tmp_path / "b.parquet"))
    assert task.problem("train", 0, 0).fields["answers"] == [["b"], ["c"]]
    assert task.problem("test", 0, 0).fields["triples"][0] == ["Ada", "knows", "Bob"]
    before = task.data()
    written(jsonl, [row(0, "whom")])
    assert [name.split()[0] for name in before] == ["train", "test"]
    assert task.data().keys() == before.keys() and task.data() != before
