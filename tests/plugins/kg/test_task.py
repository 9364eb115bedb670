"""The task `kg`: the promises of every task, its splits, and what its options do."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from rows import each_row

from rlx_plugins.kg.load import load_world_graph
from rlx_plugins.kg.questions import TYPES
from rlx_plugins.kg.task import KgQuestionFiles, KgTask

TASK = KgTask()


def test_a_fixed_problem_stays_what_it_is(tmp_path):
    # Runs made by earlier versions are compared on these.
    path = tmp_path / "family.tsv"
    facts = [f"p{i}\tmother\tp{i + 1}\np{i}\tpet\tcat {i}\n" for i in range(40)]
    names = [f"p{i}\trlx:kind\tperson\np{i}\trlx:alias\tNo. {i}\n" for i in range(41)]
    path.write_text("".join(facts + names))
    task = KgTask(graph=str(path), types={"hop2": 1.0})
    problem = task.problem("train", 0, 0)
    assert problem.id == "kg/0/name the pet of the person whose mother is p4"
    assert problem.prompt == "name the pet of the person whose mother is p4 ?"
    assert problem.stratum == "hop2"
    assert problem.fields == {
        "question": problem.prompt,
        "answers": [["cat 3"]],
        "any_of": True,
        "type": "hop2",
        "data_source": "kg.family",
        "world": 0,
        "hide": 0.15,
        "split": "train",
        "start": ["p4"],
        "chain": [["head", "mother"], ["tail", "pet"]],
    }


def test_problems_do_not_repeat_before_they_must_and_types_have_their_shares():
    train = [TASK.problem("train", i, 0) for i in range(1000)]
    assert Counter(p.stratum for p in train) == {t: 1000 * w for t, w in TASK.types.items()}
    assert len({p.id for p in train}) == 1000
    test = [TASK.problem("test", i, 0) for i in range(400)]
    assert len({p.id for p in test}) > 390
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert [TASK.problem("train", i, 1).id for i in range(20)] != [p.id for p in train[:20]]


def test_shares_that_rounding_decides_are_the_same_in_every_python():
    weights = dict(zip(TYPES, [0.1, 0.4, 0.4, 0.1, 0.5, 0.7, 0.2], strict=True))
    task = KgTask(types=weights)
    found = Counter(task.problem("train", i, 0).stratum for i in range(1000))
    # Python 3.12's `sum` of the weights makes it 41 and 292.
    assert found == dict(zip(TYPES, [42, 167, 167, 42, 208, 291, 83], strict=True))


def test_splits_share_no_wording_in_whole_passes():
    for type_ in TYPES:
        task = KgTask(types={type_: 1.0})
        train, test = (
            {task.problem(s, i, 3).prompt for i in range(3000)} for s in ("train", "test")
        )
        assert len(test) >= 20
        assert not train & test


def test_training_hides_what_testing_needs():
    assert {TASK.problem("train", i, 0).fields["hide"] for i in range(50)} == {0.15}
    assert {TASK.problem("test", i, 0).fields["hide"] for i in range(50)} == {0.0}


def test_names_of_an_answer_stand_together():
    texts = [TASK.problem("train", i, 0).fields["answers"] for i in range(2000)]
    assert ["United Kingdom", *load_world_graph().aliases(load_world_graph().entity("UK"))] in [
        n for a in texts for n in a
    ]


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


def test_another_world_asks_the_same_of_other_names():
    other = KgTask(world=1000)
    pairs = [(TASK.problem("test", i, 0), other.problem("test", i, 0)) for i in range(100)]
    for here, there in pairs:
        assert here.fields["chain"] == there.fields["chain"]
        assert here.id != there.id
        assert there.fields["world"] == 1000
    assert sum(h.fields["answers"] == t.fields["answers"] for h, t in pairs) < 30  # 6 continents


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


def test_a_graph_without_a_type_of_question_says_so(tmp_path):
    path = tmp_path / "small.tsv"
    path.write_text("".join(f"p{i}\tlikes\tq{i}\n" for i in range(40)))
    KgTask(graph=str(path), types={"forward": 1.0, "inverse": 1.0}).check()
    with pytest.raises(ValueError, match=r"no train question of the type 'hop3'"):
        KgTask(graph=str(path), types={"hop3": 1.0}).check()
    with pytest.raises(OSError, match=r"nothing\.tsv"):
        KgTask(graph=str(tmp_path / "nothing.tsv")).check()


# Questions from files -----------------------------------------------------------------------------


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
    train.unlink()
    with pytest.raises(OSError, match=r"cannot read .*a\.jsonl: No such file"):
        task.problem("train", 0, 0)


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


def test_what_cannot_be_shown_is_told_before_the_run(tmp_path):
    good = written(tmp_path / "good.jsonl", [row(0, "whom does Ada know")])
    bad = written(
        tmp_path / "bad.jsonl",
        [row(1, "who"), row(2, "what") | {"graph": [["Ada", "knows", "\u200b"]]}],
    )
    with pytest.raises(ValueError, match=r"bad\.jsonl line 2: .* as an object, got '.u200b'"):
        KgTask(files=KgQuestionFiles(train=good, test=bad)).check()


@each_row(
    ("changes", "message"),
    [
        ({"graph": [["a", "b"]]}, "expected a fact of three parts, got ['a', 'b']"),
        ({"graph": [["a", "b", ""]]}, "expected non-empty text as an object"),
        ({"graph": [["a", "\u200b", "b"]]}, "visible text as a relation, got"),
        ({"answer": ["\u200b"]}, "visible text as an answer, got"),
        ({"answer": ["a\ud83d"]}, "a lone surrogate"),
        ({"answer": "Jaxon"}, "expected a list as answer, got 'Jaxon'"),
        ({"question": None}, "expected non-empty text as question"),
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


def test_files_without_a_question_are_refused(tmp_path):
    empty = written(tmp_path / "empty.jsonl", [row(0, "nobody", ())])
    with pytest.raises(ValueError, match=r"empty\.jsonl: holds no question"):
        KgTask(files=KgQuestionFiles(train=empty, test=empty)).check()
