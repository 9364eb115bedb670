"""An exported model with its card: another home has its figures from the folder alone."""

import json
import shutil

import pytest
from hub import open_hub

REWARDS = '''
def brevity(sample, *, longest: int = 40) -> float:
    """1 for short answers."""
    return float(len(sample.response) <= longest)
'''


@pytest.fixture(scope="module")
def run(own_home):
    """A finished run with a reward of its own."""
    (own_home.folder / "rewards.py").write_text(REWARDS)
    short = {"rewards.turn.short": "{plugin: rewards.py:brevity, turn: answer}"}
    return own_home.run(own_home.submit(sets={**own_home.small, **short}))


@pytest.fixture(scope="module")
def card(own_home, run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("card") / "model"
    assert own_home.rlx("export", run.id, folder, "--card").returncode == 0
    (own_home.folder / "rewards.py").unlink()
    return folder


def test_another_home_has_the_figures(own_home, run, card, tmp_path):
    about = json.loads((card / "figures.json").read_text())
    (after,) = [found for found in about["evaluations"] if found["label"] == "after"]
    shutil.copytree(card, tmp_path / "copy")
    other = type(own_home)(tmp_path / "copy")
    done = other.rlx("eval", ".", "--spec", "experiment.yaml", "--json")
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(done.stdout)["sets"].values()
    for name in ("n", "accuracy", "brier", "ece_debiased", "readable_share"):
        assert figures[name] == pytest.approx(after["metrics"][name], abs=1e-9), name
    read = other.rlx("validate", "experiment.yaml")
    assert read.returncode == 0, read.stderr
    text = (card / "README.md").read_text()
    assert f"digest `{run.digest}`" in text and "## What it must not be used for" in text
    assert f"{after['metrics']['accuracy']:.3f} [" in text


def test_a_model_is_pushed(own_home, run, card, tmp_path):
    with open_hub() as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_right", "HF_HUB_DISABLE_XET": "1"}
        own_home.environment |= settings
        push = ("export", run.id, "--card", "--push", "me/mine")
        done = own_home.rlx(*push, tmp_path / "one")
        assert done.returncode == 0, done.stderr
        assert f"{hub.url}/me/mine/commit/1" in done.stdout
        assert hub.made[0]["visibility"] == "private"
        here = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
        assert hub.files == here
        own_home.environment["HF_TOKEN"] = "hf_wrong"
        refused = own_home.rlx(*push, tmp_path / "two")
        assert refused.returncode == 2 and "me/mine was not pushed" in refused.stderr
    away = own_home.rlx(*push, tmp_path / "three")
    assert away.returncode == 4
    assert f"me/mine was not pushed to {hub.url}: ConnectError" in away.stderr
