"""Questions with graphs of their own, in each form in which WebQSP and CWQ are passed on."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import each_row

from rlx_plugins.kg.graph import Graph
from rlx_plugins.kg.subgraphs import FileQuestion, read_questions

QUESTION = "what is the name of justin bieber brother"
ENTITIES = ["m.06w2sn5", "m.0gxnnwq", "m.0gxnnzz", "m.cvt"]
RELATIONS = ["people.person.sibling_s", "people.sibling_relationship.sibling"]
NAMES = {"m.06w2sn5": "Justin Bieber", "m.0gxnnwq": "Jaxon Bieber", "m.0gxnnzz": "jaxon  bieber"}
TRIPLES = (
    ("Justin Bieber", "people.person.sibling_s", "m.cvt"),
    ("m.cvt", "people.sibling_relationship.sibling", "Jaxon Bieber"),
)
ROG = {
    "id": "WebQTrn-0",
    "question": QUESTION,
    "answer": ["Jaxon Bieber"],
    "q_entity": ["Justin Bieber"],
    "a_entity": ["Jaxon Bieber"],
    "graph": [list(triple) for triple in TRIPLES],
}
NSM = {
    "id": "WebQTrn-0",
    "question": QUESTION,
    "answers": [{"kb_id": "m.0gxnnwq", "text": "Jaxon Bieber"}],
    "entities": [0],
    "subgraph": {"tuples": [[0, 0, 3], [3, 1, 1]], "entities": [0, 1, 3]},
}


def lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n\n" for row in rows), encoding="utf-8")
    return path


def vocabulary(folder):
    (folder / "entities.txt").write_text("\n".join(ENTITIES) + "\n")
    (folder / "relations.txt").write_text("\n".join(RELATIONS) + "\n")


def nsm(folder, **changes):
    """The one question of a file in the form of NSM."""
    vocabulary(folder)
    (question,) = read_questions(lines(folder / "train_simple.json", [NSM | changes]))
    return question


def names_of(question):
    return {name for s, _, o in question.triples for name in (s, o)}


def test_rog_by_name(tmp_path):
    (question,) = read_questions(lines(tmp_path / "test.jsonl", [ROG]))
    assert question == FileQuestion(
        id="WebQTrn-0",
        question=QUESTION,
        answers=(("Jaxon Bieber",),),
        entities=("Justin Bieber",),
        triples=TRIPLES,
    )


def test_rog_as_the_hub_keeps_it(tmp_path):
    pq.write_table(pa.Table.from_pylist([ROG] * 3), tmp_path / "a.parquet")
    assert [*read_questions(tmp_path / "a.parquet")] == [
        *read_questions(lines(tmp_path / "a.jsonl", [ROG] * 3))
    ]


@each_row("beside", ["entities_text.txt", "entities_names.json"])
def test_nsm_by_number(tmp_path, beside):
    called = {id_: NAMES.get(id_, id_) for id_ in ENTITIES}
    text = json.dumps(called) if beside.endswith("json") else "\n".join(called.values())
    (tmp_path / beside).write_text(text)
    question = nsm(tmp_path)
    assert question.triples == TRIPLES and question.entities == ("Justin Bieber",)
    assert question.answers == (("Jaxon Bieber", "m.0gxnnwq"),)
    question = nsm(tmp_path, answers=[{"kb_id": "m.06w2sn5", "text": None}])
    assert question.answers == (("Justin Bieber", "m.06w2sn5"),)


def test_nsm_without_names_shows_ids(tmp_path):
    question = nsm(tmp_path)
    assert names_of(question) == {"m.06w2sn5", "m.cvt", "m.0gxnnwq"}
    assert question.answers == (("Jaxon Bieber", "m.0gxnnwq"),)


def test_nsm_written_out(tmp_path):
    """As GraftNet wrote them, and with numbers of the question's own entities beside."""

    def thing(id_):
        return {"kb_id": id_, "text": NAMES.get(id_, id_)}

    tuples = [
        [thing("m.06w2sn5"), {"rel_id": "<fb:sibling>", "text": RELATIONS[0]}, thing("m.cvt")],
        [thing("m.cvt"), {"rel_id": "<fb:of>", "text": RELATIONS[1]}, thing("m.0gxnnwq")],
    ]
    question = nsm(tmp_path, entities=[thing("m.06w2sn5")], subgraph={"tuples": tuples})
    assert question.triples == TRIPLES and question.entities == ("Justin Bieber",)
    question = nsm(tmp_path, entities=["something else"], entities_cid=[0])
    assert question.entities == ("m.06w2sn5",)


def test_two_of_one_name_keep_their_ids(tmp_path):
    (tmp_path / "entities_names.json").write_text(json.dumps(NAMES))
    question = nsm(tmp_path, subgraph={"tuples": [[0, 0, 1], [0, 0, 2]]})
    assert names_of(question) == {"Justin Bieber", "m.0gxnnwq", "m.0gxnnzz"}
    assert Graph.from_triples(question.triples).clashes == {}


@each_row(
    ("answer", "names"),
    [
        ({"kb_id": "1926", "text": None}, ("1926",)),
        ({"kb_id": None, "text": "1926"}, ("1926",)),
        ({"kb_id": 1, "text": "m.0gxnnwq"}, ("m.0gxnnwq",)),
    ],
)
def test_answers_that_are_no_entities(tmp_path, answer, names):
    assert nsm(tmp_path, answers=[answer]).answers == (names,)
    assert nsm(tmp_path, answers=[]).answers == ()


def test_an_answer_that_is_repeated_is_one(tmp_path):
    (question,) = read_questions(lines(tmp_path / "a.jsonl", [{**ROG, "answer": ["b", "c", "b"]}]))
    assert question.answers == (("b",), ("c",))
    assert nsm(tmp_path, answers=NSM["answers"] * 2).answers == (("Jaxon Bieber", "m.0gxnnwq"),)


@each_row("name", ["a.json", "a.json.gz", "a.jsonl.gz"])
def test_lists_and_compressed_files(tmp_path, name):
    text = json.dumps([ROG, ROG], indent=1) if "jsonl" not in name else json.dumps(ROG)
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert {q.triples for q in read_questions(tmp_path / name)} == {TRIPLES}


@each_row(
    ("row", "message"),
    [
        ({"id": "x"}, "expected a field subgraph or graph, got id"),
        ({**ROG, "graph": [["a", "b"]]}, "expected a fact of three parts, got ['a', 'b']"),
        ({**ROG, "graph": [["a", "b", ""]]}, "expected non-empty text as an object"),
        ({**ROG, "graph": [["a", "\u200b", "b"]]}, "visible text as a relation, got"),
        ({**ROG, "answer": ["\u200b"]}, "visible text as an answer, got"),
        ({**NSM, "subgraph": {"tuples": [[0, 0, 4]]}}, "non-empty text as line 5 of entities.txt"),
        ({**NSM, "entities": [{"kb_id": "m.1", "text": "a\ud83d"}]}, "a lone surrogate"),
        ({**ROG, "answer": "Jaxon"}, "expected a list as answer, got 'Jaxon'"),
        ({k: v for k, v in ROG.items() if k != "question"}, "there is no 'question'"),
        ({**NSM, "entities": [7]}, "entities.txt has no line for the number 7; it has 5"),
        ({**NSM, "answers": [{"text": ""}]}, "an answer has neither text nor kb_id"),
        ({**NSM, "answers": ["Jaxon"]}, "expected an answer with kb_id and text"),
    ],
)
def test_malformed_questions_are_refused_by_place(tmp_path, row, message):
    vocabulary(tmp_path)
    with (tmp_path / "entities.txt").open("a") as names:
        names.write("\n")
    path = lines(tmp_path / "a.jsonl", [ROG, row])
    with pytest.raises(ValueError) as caught:
        list(read_questions(path))
    assert str(caught.value).startswith(f"{path} line 3: ") and message in str(caught.value)


def test_what_is_missing_or_something_else(tmp_path):
    path = lines(tmp_path / "a.json", [NSM])
    with pytest.raises(OSError, match=r"cannot read .*entities.txt"):
        list(read_questions(path))
    vocabulary(tmp_path)
    (tmp_path / "entities_text.txt").write_text("only one\n")
    with pytest.raises(ValueError, match=r"has 1 lines and entities.txt 4"):
        list(read_questions(path))
    for name, content in (("a.csv", ""), ("b.json", "[{]"), ("c.json", "[3]"), ("d.jsonl", "3")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name}.*(must end|not readable|not a JSON)"):
            list(read_questions(tmp_path / name))
