"""The records of data files are part of what was run."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from guests import installed
from rows import each_row

from rlx.cli import main
from rlx.errors import SpecError
from rlx.home import RunFolder
from rlx.launch import rank
from rlx.launch.rank import KERNELS
from rlx_gyms.verifiers import VerifiersTask
from rlx_plugins.dataset import Dataset
from rlx_registry import find_changed_plugins

MINE = """
name: mine
model: {kind: tiny}
task: {plugin: dataset, train: {path: questions.jsonl}, test: {path: test.jsonl}, prompt: "{q}"}
rollout: {schedule: single, answer: {max_new_tokens: 8, spans: [answer]}}
rewards: {turn: {accuracy: {plugin: exact_match, turn: answer}}}
phases: [{name: grpo, steps: 1}]
"""


def write(file, answers, **options):
    lines = [
        json.dumps({"q": f"{file} {n}?", "answer": a}, **options) for n, a in enumerate(answers)
    ]
    Path(file).write_text("\n".join(lines) + "\n")


@pytest.fixture
def files(folder):
    (folder / "mine.yaml").write_text(MINE)
    write("questions.jsonl", "1234")
    write("test.jsonl", "12")
    return folder


@each_row(
    ("span", "code", "said"),
    [
        ("answer", 0, "ok"),
        ("anwser", 2, "reads the span 'anwser', which turn 'answer' does not declare"),
        ("null", 0, "ok"),
    ],
)
def test_a_span_that_the_turn_does_not_have_is_an_error(files, capsys, span, code, said):
    assert main(["validate", "mine.yaml", f"--set=rewards.turn.accuracy.span={span}"]) == code
    assert said in " ".join("".join(capsys.readouterr()).split())


@each_row("gold", [None, True, "", " ", []])
def test_a_right_answer_that_the_reward_cannot_use_is_an_error(files, capsys, gold):
    write("questions.jsonl", ["1", "2", "3", gold])
    assert main(["validate", "mine.yaml"]) == 2
    said = " ".join("".join(capsys.readouterr()).split())
    assert "the reward cannot use questions.jsonl line 4, 'questions.jsonl 3?'" in said
    assert f"the field 'answer' must hold text or numbers, got {gold!r}" in said
    write("questions.jsonl", map(str, range(400)))
    write("test.jsonl", [*map(str, range(300)), gold, gold])
    assert main(["validate", "mine.yaml"]) == 2
    said = " ".join("".join(capsys.readouterr()).split())
    assert "the reward cannot use test.jsonl line 301, 'test.jsonl 300?'" in said
    assert "so are 2 of 702 problems" in said


def submit(capsys, *options):
    assert main(["submit", "mine.yaml", "--queue", "--no-rehearsal", *options]) == 0
    return capsys.readouterr()


def test_a_file_that_was_edited_in_place_makes_a_new_run(files, capsys):
    assert "r-0001" in submit(capsys).out
    write("questions.jsonl", "1234", indent=None, separators=(", ", " :  "))
    again = "".join(submit(capsys))
    assert "nothing to do" in again and "r-0001" in again
    write("questions.jsonl", "1235")
    new = "".join(submit(capsys))
    assert "r-0002" in new and "dataset changed since r-0001" in new


BREVITY = """
from rlx.plugin import reward

@reward
def brevity(sample, *, limit: int = 5):
    return float(len(sample.text) < limit)
"""


def test_code_and_name_make_another_run_and_a_default_that_is_written_out_does_not(
    files, capsys, monkeypatch
):
    point = "[rlx.rewards]\nbrevity = page_brevity:brevity\n"

    def ask(source, *options, use="{plugin: brevity, turn: answer}"):
        with installed(files, monkeypatch, "page-brevity", point, page_brevity=source):
            return "".join(submit(capsys, f"--set=rewards.turn.brevity={use}", *options))

    changed = BREVITY.replace("float", "0.5 * float")
    assert "run     r-0001" in ask(BREVITY)
    written = ask(BREVITY, use="{plugin: brevity, turn: answer, limit: 5}")
    assert "queued as r-0001" in written
    out = ask(changed)
    assert "run     r-0002" in out and "new     brevity changed since r-0001" in out
    assert "queued as r-0002" in ask(changed)
    assert "queued as r-0001" in ask(BREVITY), "the former one is recorded already"
    out = ask(BREVITY, "--set=name=other")
    assert "new     r-0001 is the same experiment under the name mine" in out
    assert "nothing to do" in ask(BREVITY, "--set=name=other")


PHASES = """
phases:
  - {name: easy, steps: 1}
  - name: hard
    steps: 1
    set: {task.train.path: hard.jsonl}
"""


def test_data_of_a_phase_are_part_of_what_was_run_too(registry, files, capsys):
    (files / "mine.yaml").write_text(MINE.split("phases:")[0] + PHASES)
    write("hard.jsonl", "12345")
    assert "r-0001" in submit(capsys).out
    assert "nothing to do" in "".join(submit(capsys))
    write("hard.jsonl", "12346")
    new = "".join(submit(capsys))
    assert "r-0002" in new and "dataset changed since r-0001" in new
    write("hard.jsonl", "12345")
    assert registry.transition("r-0002", {"queued"}, "stopped")
    assert main(["resume", "r-0002", "--detach"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "train hard.jsonl was 5 records with digest" in said
    assert "questions.jsonl" not in said


def test_validate_says_which_data_are_missing(files, capsys):
    (files / "mine.yaml").write_text(MINE.split("phases:")[0] + PHASES)
    assert main(["validate", "mine.yaml"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("its data are not on this machine") == 1
    assert "hard.jsonl" in said and "mine.yaml:12" in said
    (files / "questions.jsonl").unlink()
    write("hard.jsonl", "12345")
    assert main(["validate", "mine.yaml"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("its data are not on this machine") == 1
    assert "questions.jsonl" in said and "mine.yaml:4:" in said


def test_a_run_does_not_go_on_with_other_data(registry, files, capsys):
    submit(capsys)
    assert registry.transition("r-0001", {"queued"}, "stopped")
    write("questions.jsonl", "12345")
    assert main(["resume", "r-0001", "--detach"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "r-0001 cannot go on with other data. task plugin 'dataset': train questions.jsonl " in said
    )
    assert "was 4 records with digest " in said and "and is 5 records with digest " in said
    assert "test.jsonl" not in said and "--from-checkpoint r-0001@latest" in said


def test_a_run_from_the_queue_does_not_begin_with_other_data(files, capsys, monkeypatch):
    submit(capsys)
    run = RunFolder(files / "home" / "runs" / "r-0001")
    trained = []
    ranks = SimpleNamespace(is_first=True, device=SimpleNamespace(type="cpu"))
    monkeypatch.setattr("rlx.learner.join_ranks", lambda runner: ranks)
    monkeypatch.setattr("rlx.run.run_experiment", lambda *_: trained.append(1))
    monkeypatch.setenv("RLX_RUN_REGISTRY", f"sqlite:///{files}/home/registry.db")
    monkeypatch.setenv("RLX_RUN_ATTEMPT", "0")
    for name in (KERNELS, "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "cpu")
    rank._run_rank(run.root, "r-0001")
    write("questions.jsonl", "12345")
    with pytest.raises(SpecError, match=r"cannot go on with other data.*was 4 records"):
        rank._run_rank(run.root, "r-0001")
    assert trained == [1]


def test_every_length_is_bounded_before_a_run_is_recorded(files, capsys):
    write("questions.jsonl", map(str, range(300)))
    long = json.dumps({"q": " ".join(map(str, range(2000))), "answer": "1"})
    Path("questions.jsonl").write_text(Path("questions.jsonl").read_text() + long)
    everything = ["--set=rollout.prompts_per_step=400"]
    assert main(["submit", "mine.yaml", "--queue", "--no-rehearsal", *everything]) == 2
    said = " ".join("".join(capsys.readouterr()).split())
    assert "1 of the first 301 problems do not fit" in said
    submit(capsys, *everything, "--set=rollout.max_prompt_tokens={}")


def test_a_digest_is_that_of_the_records_however_they_are_written(folder):
    Path("a.jsonl").write_text('{"q": "x", "answer": "1"}\n')
    Path("b.jsonl.gz").write_bytes(gzip.compress(b'\n{"answer":"1",   "q":"x"}'))
    sources = {"train": {"path": "a.jsonl"}, "test": {"path": "b.jsonl.gz"}, "prompt": "{q}"}
    digest = "1 records with digest 973e6a05263c8302"
    assert Dataset.model_validate_json(json.dumps(sources)).data() == {
        "train a.jsonl": digest,
        "test b.jsonl.gz": digest,
    }


def test_a_folder_of_problems_has_a_digest_too(folder):
    (folder / "sums").mkdir()
    digests = []
    for text in ("a = 1", "a = 2", "a = 1"):
        (folder / "sums" / "rows.py").write_text(text)
        digests.append(VerifiersTask(taskset="sums", python="python").data()["taskset sums"])
    assert digests[0] == digests[2] != digests[1]
    assert VerifiersTask(taskset="a_package", python="python").data() == {}


CODE = {"kind": "task", "name": "dataset", "distribution": "rlx", "version": "1", "sha256": "a"}


@each_row(
    ("then", "changed"),
    [
        ({"data": {"train x": "1"}}, []),
        ({"data": {"train x": "2"}}, ["dataset"]),
        ({"data": {"train x": "1", "test y": "1"}}, ["dataset"]),
        ({"data": {}}, []),  # runs of earlier versions
        ({}, []),
        ({"data": {"train x": "1"}, "sha256": "b"}, ["dataset"]),
        ({"data": {}, "sha256": "b"}, ["dataset"]),
    ],
)
def test_data_without_a_digest_are_not_compared(then, changed):
    now = {**CODE, "data": {"train x": "1"}}
    assert find_changed_plugins([now], [{**CODE, **then}]) == changed
    assert find_changed_plugins([{**CODE, **then}], [now]) == changed


def test_a_use_without_files_does_not_hide_that_those_of_another_use_changed():
    plain = {**CODE, "data": {}}
    then, now = ({**CODE, "data": {"train": digest}} for digest in ("a", "b"))
    assert find_changed_plugins([now, plain], [then, plain]) == [CODE["name"]]
    assert find_changed_plugins([then, plain], [plain, then]) == []
