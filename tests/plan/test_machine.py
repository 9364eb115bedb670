"""What this machine lacks for an experiment, told at its line before anything is recorded."""

from pathlib import Path

import pytest
from guests import write_distribution

from rlx.launch.machine import Package
from rlx.model import build_policy
from rlx.plan import check_file, machine, run_preflight_checks
from rlx.spec import TinyModelSpec
from rlx.spec.reading.diagnostics import InvalidSpec

RLCR = (Path(__file__).parents[2] / "experiments" / "rlcr.yaml").read_text()


def refused(folder, text, *overrides):
    """The one fault of an experiment that is well-formed."""
    file = folder / "experiment.yaml"
    file.write_text(text)
    read, plugins = check_file(file, overrides)
    with pytest.raises(InvalidSpec) as caught:
        run_preflight_checks(read, plugins)
    (fault,) = caught.value.diagnostics
    assert caught.value.exit_code == fault.exit_code
    return fault


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path
    assert not (tmp_path / "home").exists(), "nothing is made for what cannot run"


def test_a_missing_device_is_said_where_it_is_asked_for(folder):
    fault = refused(folder, RLCR + "\nrunner: {ranks: 2,\n  device: cuda}\n")
    lines = (RLCR + "\nrunner:").count("\n") + 2
    assert (fault.exit_code, fault.position.line, fault.position.column) == (4, lines, 11)
    assert fault.message == "the experiment needs 2 CUDA devices, one per rank, found 0"
    (note,) = fault.notes
    assert note.startswith("found: torch ")


def test_missing_model_files_and_packages(folder, monkeypatch):
    lora = "model={kind: pretrained, path: ./no/model, lora: {}}"
    fault = refused(folder, RLCR, lora)
    assert (fault.exit_code, fault.path) == (4, ("model", "path"))
    assert "./no/model" in fault.message
    none = Package("peft", ">=0.17", "lora", installed=None, fits=False)
    monkeypatch.setattr("rlx.plan.machine.list_packages", lambda: {"peft": none})
    monkeypatch.setattr("rlx.model.check_model_files", lambda _: None)
    fault = refused(folder, RLCR, lora)
    assert (fault.exit_code, fault.path) == (4, ("model", "lora"))
    assert fault.helps == ("pip install 'peft>=0.17'",)


GUEST = """
from rlx.plugin import Reward

class Guest(Reward):
    raises: str

    def score(self, sample):
        return 0.0

    def check(self):
        raise {"os": OSError("no such file"), "import": ImportError("no nltk"),
               "value": ValueError("line 3 is no word"), "bug": KeyError("x")}[self.raises]
"""


@pytest.mark.parametrize(
    ("raises", "code", "said"),
    [
        ("os", 4, "no such file"),
        ("import", 4, "no nltk"),
        ("value", 2, "line 3 is no word"),
        ("bug", 3, "rewards.turn.g: Guest.check() failed: 'x'"),
    ],
)
def test_what_a_plugin_finds_missing_has_the_exit_code_of_its_kind(
    raises, code, said, folder, monkeypatch
):
    points = "[rlx.rewards]\nguest = rlx_guest_check:Guest\n"
    write_distribution(folder / "site", "rlx-guest-check", points, rlx_guest_check=GUEST)
    monkeypatch.syspath_prepend(folder / "site")
    use = f"rewards.turn.g={{plugin: guest, turn: answer, raises: {raises}}}"
    fault = refused(folder, RLCR, use)
    assert (fault.exit_code, fault.path, fault.message) == (code, ("rewards", "turn", "g"), said)
    if code != 3:
        phase = f"phases.0.set.rewards.turn.g={{plugin: guest, turn: answer, raises: {raises}}}"
        fault = refused(folder, RLCR, phase)
        assert fault.path == ("phases", 0, "set", "rewards.turn.g")


def test_a_disk_too_small_for_the_checkpoints_is_warned_of(monkeypatch):
    file = Path(__file__).parents[2] / "experiments" / "rlcr_1.5b.yaml"

    def warnings(free, *overrides):
        monkeypatch.setattr(machine, "free_bytes", lambda _: free << 30)
        read, _ = check_file(file, overrides)
        return [found.message for found in machine._find_small_disk(read.spec, Path("/home"))]

    (message,) = warnings(60)
    assert message.startswith("3 checkpoints of 20 GB and the trained model need about 66 GB, but ")
    assert not warnings(70)
    assert not warnings(60, "phases.0.steps=20"), "the run writes but two"
    assert not warnings(10, "runner.checkpoint.every=0")
    assert len(warnings(5, "runner.checkpoint.every=0")) == 1


DISTILL = (Path(__file__).parents[2] / "experiments" / "distill.yaml").read_text()


def test_a_teacher_that_cannot_be_read_is_told_at_its_line(folder):
    shape = {"hidden_size": 32, "layers": 1}
    build_policy(TinyModelSpec(tokenizer="arithmetic_05", **shape), 0).save(folder / "other")
    build_policy(TinyModelSpec(tokenizer="arithmetic", max_position=64, **shape), 0).save(
        folder / "short"
    )
    rows = {
        "missing": "there is no folder",
        "other": "the reference has another tokenizer: token ",
        "short": "the reference reads at most 64 tokens, and the turns may take 64",
    }
    found = {}
    for name in rows:
        place = [f"model.reference.path={folder / name}", "rollout.answer.max_new_tokens=64"]
        fault = refused(folder, DISTILL, *place)
        assert fault.path == ("model", "reference", "path")
        found[name] = fault.message
    assert {name: text for name, text in found.items() if rows[name] not in text} == {}
    assert found["missing"].startswith("model.reference.path: ")
