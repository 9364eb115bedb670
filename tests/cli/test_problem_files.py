"""Problems from the published files of WebQSP and CWQ, through the command line."""

import gzip
import json
from pathlib import Path
from runpy import run_path

import pyarrow as pa
import pyarrow.parquet as pq

from rlx.cli import main

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CWQ = EXPERIMENTS / "kg_cwq_3b.yaml"


def rog(number, **changes):
    """A row as the hub has it."""
    return {
        "id": f"WebQTest-{number}",
        "question": f"who made thing {number}",
        "answer": ["Bob"],
        "q_entity": ["Ada, <b> Inc."],
        "a_entity": ["Bob"],
        "graph": [["Ada, <b> Inc.", "business.made", "Bob"], ["Bob", "people.age", "41"]],
        **changes,
    }


def test_the_script_writes_what_the_experiment_reads(folder, capsys):
    """CWQ of seven invented questions."""
    train = {"a": [rog(n) for n in range(3)], "b": [rog(3, answer=[]), rog(4, answer=["Eve"])]}
    for name, rows in train.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "c.jsonl").write_text("".join(json.dumps(rog(n)) + "\n" for n in (5, 6)))
    script = run_path(str(EXPERIMENTS / "webqsp_cwq.py"))
    script["main"](["cwq", "--train", "a.parquet", "b.parquet", "--test", "c.jsonl"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith(
        "train.jsonl.gz: 5 questions, 4 with an answer, 3 with an answer in their graph, "
        "2 facts each"
    )
    data = folder / ".rlx" / "data" / "cwq"
    assert sorted(path.name for path in data.iterdir()) == ["test.jsonl.gz", "train.jsonl.gz"]
    with gzip.open(data / "test.jsonl.gz", "rt") as stream:
        first = json.loads(stream.readline())
    assert first == {k: v for k, v in rog(5).items() if k != "a_entity"}
    assert main(["validate", str(CWQ)]) == 0
    capsys.readouterr()
    assert main(["plan", str(CWQ), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert not [f for f in said["findings"] if f["severity"] == "error"]
    assert not [note for note in said["notes"] if "task:" in note]
    assert 'Entities in the question: \\"Ada, ‹b› Inc.\\"' in json.dumps(said, ensure_ascii=False)
