"""Problems from the published files of Countdown, WebQSP and CWQ, through the command line."""

import gzip
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlx.cli import main

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CWQ = EXPERIMENTS / "kg_cwq_3b.yaml"


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def planned(capsys, *arguments):
    """The first problem that `rlx plan` shows, and everything it says about what stands in."""
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert not [f for f in said["findings"] if f["severity"] == "error"]
    return said


# Countdown ---------------------------------------------------------------------------------------


COUNTDOWN = [{"target": a * b, "nums": [a, b]} for a in range(2, 9) for b in range(2, 9)]
PROBE = EXPERIMENTS / "countdown_probe.yaml"


def of_file(source):
    options = ["plugin: countdown", f"files: {{train: {source}}}", 'operators: "+-*"']
    return ["--set", f"task={{{', '.join(options)}}}"]


def test_the_probe_plans_with_the_hubs_parquet(folder, capsys):
    path = parquet(folder / "train.parquet", COUNTDOWN)
    assert main(["validate", str(PROBE), *of_file(f"{{path: {path}}}")]) == 0
    assert "ok" in capsys.readouterr().out
    said = planned(capsys, PROBE, *of_file(f"{{path: {path}}}"))
    assert "nums: " in json.dumps(said)
    assert not [note for note in said["notes"] if "task:" in note]


@pytest.mark.parametrize("verb", ["plan", "submit"])
def test_a_malformed_row_stops_every_verb_that_reads(verb, folder, capsys):
    path = parquet(folder / "train.parquet", [*COUNTDOWN, {"target": 7, "nums": None}])
    assert main([verb, str(PROBE), *of_file(f"{{path: {path}}}")]) == 2
    assert "train.parquet row 50: nums must be a list of whole numbers" in capsys.readouterr().err


# WebQSP and CWQ ----------------------------------------------------------------------------------


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


def script():
    """The program that writes the data; it belongs to no package."""
    found = spec_from_file_location("webqsp_cwq", EXPERIMENTS / "webqsp_cwq.py")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def made(folder, capsys):
    """The folder with CWQ of seven invented questions, as the script writes it."""
    parquet(folder / "a.parquet", [rog(n) for n in range(3)])
    parquet(folder / "b.parquet", [rog(3, answer=[]), rog(4, answer=["Eve"])])
    (folder / "c.jsonl").write_text("".join(json.dumps(rog(n)) + "\n" for n in (5, 6)))
    script().main(["cwq", "--train", "a.parquet", "b.parquet", "--test", "c.jsonl"])
    return folder


def test_the_script_writes_what_the_experiment_reads(made, capsys):
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith(
        "train.jsonl.gz: 5 questions, 4 with an answer, 3 with an answer in their graph, "
        "2 facts each"
    )
    folder = made / ".rlx" / "data" / "cwq"
    assert sorted(path.name for path in folder.iterdir()) == ["test.jsonl.gz", "train.jsonl.gz"]
    with gzip.open(folder / "test.jsonl.gz", "rt") as stream:
        first = json.loads(stream.readline())
    assert first == {k: v for k, v in rog(5).items() if k != "a_entity"}
    assert main(["validate", str(CWQ)]) == 0
    capsys.readouterr()
    said = planned(capsys, CWQ)
    assert not [note for note in said["notes"] if "task:" in note]
    assert 'Entities in the question: \\"Ada, ‹b› Inc.\\"' in json.dumps(said, ensure_ascii=False)
