"""Two steps of each schedule with the real weights of SmolLM2-135M-Instruct, where they are."""

import lzma
import shutil
from pathlib import Path

import pytest
from real_models import COMPRESSED, COPIED, FETCHED, FOLDER, find_real_weights

SPEC = Path(__file__).with_name("smollm2.yaml")
NAMES = ("two turns", "single turn", "many turns")


class Done:
    """A run that was followed to its end, its steps by the name of their phase, and the folder to
    which its model was imported."""

    def __init__(self, home, imported):
        self.home, self.record, self.imported = home, home.run("r-0001"), imported
        bodies = [trees for _, trees, _ in home.bodies(self.record)]
        self.phases = {name: bodies[2 * at : 2 * at + 2] for at, name in enumerate(NAMES)}

    def trees(self):
        return [tree for steps in self.phases.values() for trees in steps for tree in trees]


@pytest.fixture(scope="module")
def done(own_home):
    folder = own_home.folder
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(find_real_weights())
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(FETCHED / name, folder)
    shutil.copy(SPEC, folder / "smollm2.yaml")
    own_home.add_plugins("rlx-guess")
    own_home.environment["XDG_CACHE_HOME"] = str(folder / "cache")
    submitted = own_home.rlx("submit", "smollm2.yaml")
    assert submitted.returncode == 0, submitted.stderr
    (imported,) = (folder / "cache" / "rlx" / "gguf").iterdir()
    yield Done(own_home, imported)
    shutil.rmtree(folder)  # gigabytes


def test_the_tokenizer_of_the_tests_is_the_imported_one(done):
    assert (
        lzma.decompress((FOLDER / COMPRESSED).read_bytes())
        == (done.imported / "tokenizer.json").read_bytes()
    )
    for name in COPIED:
        assert (FOLDER / name).read_text() == (done.imported / name).read_text(), name


def test_six_steps_are_recorded_and_hold_together(done):
    assert done.record.status == "finished"
    assert all(len(steps) == 2 for steps in done.phases.values())
    checked = done.home.json("check", "r-0001")
    assert checked["holds"] and not checked["unchecked"]


def test_the_model_answers_in_the_asked_form_in_every_schedule(done):
    """The prefix opens the tag; the model closes it."""
    for name, steps in done.phases.items():
        for trees in steps:
            turns = [s for tree in trees for s in tree["segments"] if s["author"] == "policy"]
            closed = [turn for turn in turns if turn["spans"] != "{}"]
            assert len(closed) > len(turns) / 2, (name, [turn["text"] for turn in turns])


def test_a_finished_run_keeps_its_model_and_no_optimizer_state(done):
    root = Path(done.record.directory)
    assert not (root / "checkpoints").exists()
    exported = done.home.folder / "exported"
    assert done.home.rlx("export", "r-0001", exported).returncode == 0
    for file in (root / "model").iterdir():
        assert (exported / file.name).read_bytes() == file.read_bytes(), file.name
    fork = done.home.rlx("submit", "smollm2.yaml", "--from-checkpoint", "r-0001@latest")
    assert fork.returncode == 2
    assert "r-0001 has finished and kept no checkpoint" in fork.stderr


TOOL = """
def look_up(item: str) -> int:
    \"\"\"The price of one.

    Args:
        item: what is sold
    \"\"\"
    return len(item)
"""
SHOP = """
name: shop
model: {kind: pretrained, path: SmolLM2-135M-Instruct.Q4_1.gguf}
task: {plugin: dataset, train: {path: train.jsonl}, held_out: 0.1, prompt: "{question}"}
rollout: {schedule: environment, tools: [shop.py:look_up], prompts_per_step: 2, num_generations: 2}
rewards: {global: {accuracy: {plugin: exact_match}}}
phases: [{name: grpo, steps: 1}]
"""


def test_a_run_whose_template_writes_no_tools_ends_before_it_samples(done):
    """The template is read when the file is imported, after `rlx submit` has checked the rest."""
    folder = done.home.folder
    (folder / "shop.py").write_text(TOOL)
    (folder / "shop.yaml").write_text(SHOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(done.home.environment, "XDG_CACHE_HOME", str(folder / "empty"))
        ended = done.home.rlx("submit", "shop.yaml")
    assert ended.returncode == 2
    assert "the model's chat template does not write tools" in ended.stderr
    assert "set model.chat_template: false" in ended.stderr
    record = done.home.run("r-0002")
    assert (record.status, record.step) == ("failed", 0)
    assert not list((Path(record.directory) / "rollouts").glob("*.parquet"))
