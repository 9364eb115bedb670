"""The GPU profile of the study: its README's commands plan, its sets read their data."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from rlx.phase_setup import build_setup
from rlx.plan import check_file
from rlx.plugin import Sample
from rlx.results import TrainedModel, build_set_spec
from rlx.spec.reading import read_suite
from rlx.spec.reading.reader import read_document

ROOT = Path(__file__).parents[2]
GPU = ROOT / "experiments" / "study" / "gpu"
EXPERIMENTS = sorted(path.stem for path in GPU.glob("*.yaml"))
SUITES = {"hotpot": EXPERIMENTS[:3], "math": EXPERIMENTS[3:]}
RECORDS = {
    "paragraphs": {"question": "Who?", "paragraphs": "[1] Mo.", "answer": "Mo", "removed": 0},
    "mehuldamani": {"problem": "2 + 2", "answer": "4", "source": "sums"},
    "HuggingFaceH4": {"problem": "2 + 2", "answer": "4", "subject": "Algebra"},
    "mandarjoshi": {"question": "Who?", "answer": {"value": "Mo", "aliases": ["M.", "Mo"]}},
    "basicv8vc": {"problem": "Who?", "answer": "Mo", "metadata": "{}"},
    "tau": {
        "question": "Who?",
        "choices": {"label": [*"ABCDE"], "text": [*"vwxyz"]},
        "answerKey": "D",
    },
}
"""Invented records, as each of the hub's owners shapes them, and as hotpot.py writes them."""
RIGHT = {"tau": "D", "mandarjoshi": "mo", "paragraphs": "mo."}
"""What answers them, where that is not word by word their `answer`."""


def script():
    """The program that takes paragraphs away; it belongs to no package."""
    found = spec_from_file_location("hotpot", GPU / "hotpot.py")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


# Suites ------------------------------------------------------------------------------------------


def record_of(source):
    """A record as a source holds it, and what answers it."""
    owner = source.hub.partition("/")[0] if source.hub else "paragraphs"
    return RECORDS[owner], RIGHT.get(owner) or RECORDS[owner]["answer"]


def test_a_suite_fits_and_reads_its_data(tmp_path, subtests):
    for suite, name in [(suite, name) for suite, own in SUITES.items() for name in own]:
        with subtests.test(suite=suite, name=name):
            target = TrainedModel(name, read_document(GPU / f"{name}.yaml"), "nowhere", None)
            asked = read_suite(GPU / "suites" / f"{suite}.yaml")
            assert {one.distribution for one in asked.sets.values()} == {"in", "out"}
            for title, one in asked.sets.items():
                parts = build_setup(build_set_spec(target, title, one, ()))
                record, right = record_of(parts.task.test)
                test = tmp_path / f"{title}.jsonl"
                test.write_text(json.dumps(record))
                train = tmp_path / f"{title}.train.jsonl"
                own = {key: "Other?" for key in ("question", "problem") if key in record}
                train.write_text(json.dumps({**record, **own}))
                task = parts.task.model_validate(
                    {**parts.task.model_dump(), "train": {"path": train}, "test": {"path": test}}
                )
                problem = task.problem("test", 0, 0)
                assert "Who?" in problem.prompt or "2 + 2" in problem.prompt, title
                (accuracy,) = [r for r in parts.rewards if r.name == "accuracy"]
                for said, score in ((right, 1.0), ("nobody", 0.0)):
                    sample = Sample(
                        id="a",
                        problem=dict(problem.fields),
                        turn="answer",
                        number=1,
                        response=said,
                        spans={"answer": said},
                    )
                    assert accuracy.plugin.score(sample).value == score, title


# Data --------------------------------------------------------------------------------------------


def raw(number, sentence="A sentence. "):
    """An invented record as the hub has HotpotQA's: paragraphs 0 and 1 matter."""
    titles = [f"title {k}" for k in range(10)]
    return {
        "id": f"raw-{number}",
        "question": f"Question {number}?",
        "answer": "Mo",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["title 0", "title 1", "title 0"], "sent_id": [0, 0, 1]},
        "context": {"title": titles, "sentences": [[f"P{k}. ", sentence] for k in range(10)]},
    }


def test_paragraphs_are_taken_away():
    modified = script().modified
    counts = {0: 0, 1: 0, 2: 0}
    for number in range(300):
        made = modified(raw(number))
        paragraphs = made["paragraphs"].split("\n\n")
        assert [p.split("] ")[0] for p in paragraphs] == [f"[{k}" for k in range(1, 9)]
        left = sum(f"P{k}." in made["paragraphs"] for k in (0, 1))
        assert left == 2 - made["removed"]
        counts[made["removed"]] += 1
        assert made == modified(raw(number))
    assert min(counts.values()) > 70
    assert modified(raw(0), taken=0)["paragraphs"].count("] P") == 10


def test_the_script_writes_what_the_experiments_read(tmp_path, capsys):
    for split, numbers in (("train", range(20)), ("test", range(20, 30))):
        (tmp_path / f"{split}.jsonl").write_text(
            "".join(f"{json.dumps(raw(number))}\n" for number in numbers)
        )
    options = ["--train", tmp_path / "train.jsonl", "--test", tmp_path / "test.jsonl"]
    script().main([*map(str, options), "--to", str(tmp_path / "made")])
    assert "20 questions, 20000 are wanted" in capsys.readouterr().out
    _, plugins = check_file(GPU / "hotpot.yaml")
    for test in ("test", "vanilla"):
        options = {
            "train": {"path": tmp_path / "made" / "train.jsonl"},
            "test": {"path": tmp_path / "made" / f"{test}.jsonl"},
        }
        task = plugins.task.model_validate({**plugins.task.model_dump(), **options})
        assert {k: len(v) for k, v in task._splits().items()} == {"train": 20, "test": 10}
