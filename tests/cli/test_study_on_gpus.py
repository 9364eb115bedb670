"""The GPU profile of the study: its README's commands plan, its sets read their data."""

import json
import re
import shlex
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path

import pytest

from rlx.phase_setup import build_setup
from rlx.plan import check_file
from rlx.plan.report import build_plan
from rlx.plugin import Sample
from rlx.results import TrainedModel, build_set_spec
from rlx.spec.reading import read_suite
from rlx.spec.reading.reader import read_document

ROOT = Path(__file__).parents[2]
GPU = ROOT / "experiments" / "study" / "gpu"
EXPERIMENTS = sorted(path.stem for path in GPU.glob("*.yaml"))
SUITES = {"hotpot": EXPERIMENTS[:3], "math": EXPERIMENTS[3:]}
README = (GPU / "README.md").read_text()

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


OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
BESIDES = [
    "math.yaml --set 'sampler={engine: vllm}'",
    "math.yaml --set estimator.normalize=std $sigma",
    "math.yaml --set model.path=Qwen/Qwen2.5-1.5B-Instruct",
    "hotpot.yaml $seven --set runner.ranks=4 --set runner.offload_optimizer=true",
]
"""Overrides that the README names in passing."""


def commands():
    """Every `rlx plan` and `rlx submit` of the README, with its variables filled in."""
    text = README.replace("\\\n", " ")
    variables = dict(re.findall(r'^    (\w+)="(.*?)"$', text, re.MULTILINE))
    lines = re.findall(r"^    rlx (?:plan|submit) (.*)$", text, re.MULTILINE)
    for line in [*lines, *(f"experiments/study/gpu/{line}" for line in BESIDES)]:
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        yield line.partition("  #")[0].strip()


def planned(line):
    """The plan of one command's experiment, for each value of its grids."""
    file, *words = shlex.split(line)
    sets = [word for flag, word in pairwise(words) if flag == "--set"]
    grids = [word for flag, word in pairwise(words) if flag == "--grid"]
    said = [[]]
    for grid in grids:
        path, _, values = grid.partition("=")
        said = [[*have, f"{path}={value}"] for have in said for value in values.split(",")]
    for more in said:
        read, plugins = check_file(ROOT / file, [*sets, *more])
        yield build_plan(ROOT / file, read, plugins)


def test_every_command_of_the_readme_plans(monkeypatch, tmp_path, subtests):
    for line in sorted(set(commands())):
        with subtests.test(line=line), monkeypatch.context() as monkeypatch:
            monkeypatch.setenv("HF_HOME", str(tmp_path))
            for name in OFFLINE:
                monkeypatch.setenv(name, "1")
            monkeypatch.chdir(ROOT)
            for report in planned(line):
                assert report.exit_code == 0
                assert not [f for f in report.findings if f.severity == "error"]
                assert all(phase.memory.total > 0 for phase in report.phases), "no files are needed"
                assert any("its data are not" in note for note in report.notes) != (
                    "samples" in line
                )


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


def test_what_does_not_fit_is_left_out():
    modified = script().modified
    assert modified(raw(0, "long " * 200)) is None
    few = raw(0)
    few["context"] = {"title": ["title 0", "title 1"], "sentences": [["a"], ["b"]]}
    assert modified(few) is None
    one = raw(0)
    one["supporting_facts"]["title"] = ["title 0"]
    assert modified(one) is None


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


def test_other_records_are_refused_by_place(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"question": "?"}\n')
    with pytest.raises(SystemExit, match="line 1: not HotpotQA"):
        script().main(["--train", str(path), "--test", str(path), "--to", str(tmp_path)])
