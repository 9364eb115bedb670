"""An exported model with its card: another home has its figures from the folder alone."""

import json
import shutil
from pathlib import Path
from unittest.mock import create_autospec

import httpx
import pytest
from huggingface_hub import HfApi, RepoUrl
from huggingface_hub.errors import HfHubHTTPError
from patience import find_free_port

from rlx.cli import main
from rlx.results.export import _copy_data
from rlx_registry import Registry

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


def test_copied_data_keep_the_digest_where_their_paths_are_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outside, folder = tmp_path / "outside.jsonl", tmp_path / "model"
    (tmp_path / "sets").mkdir()
    folder.mkdir()
    named = {"train": "sets/a.jsonl", "test": str(outside), "more": ["README.md", "sets/a.jsonl"]}
    for path in ("sets/a.jsonl", outside, "README.md"):
        Path(path).write_text(str(path))
    copied = _copy_data(named, folder)
    assert copied == {
        "train": "sets/a.jsonl",
        "test": "data/outside.jsonl",
        "more": ["data/README.md", "sets/a.jsonl"],
    }
    assert (folder / "sets" / "a.jsonl").read_text() == "sets/a.jsonl"
    (folder / "sets" / "a.jsonl").write_text("of another experiment")
    assert _copy_data("sets/a.jsonl", folder) == "data/a.jsonl"


def test_a_card_has_the_figures_of_every_tool(own_home, run, tmp_path):
    with Registry.open(f"sqlite:///{own_home.path}/registry.db") as registry:
        for suite, figures in {
            "lm_eval/gsm8k": {"n": 20, "accuracy": None, "exact_match/strict": 0.25},
            "inspect/sums": {"n": 9, "accuracy": 0.75, "stderr": 0.125},
            "probe/mistake": {"same_answer": 0.5},
        }.items():
            n, payload = figures.get("n", 7), {"tool": suite.partition("/")[0]}
            registry.results.add_evaluation(run.id, run.step, "step", suite, n, figures, payload)
    assert own_home.rlx("export", run.id, tmp_path / "model", "--card").returncode == 0
    text = (tmp_path / "model" / "README.md").read_text()
    assert f"\n- lm_eval/gsm8k, step {run.step}, 20 answers: exact_match/strict 0.250\n" in text
    assert f"\n- inspect/sums, step {run.step}, 9 answers: accuracy 0.750, stderr 0.125\n" in text
    assert f"\n- probe/mistake, step {run.step}, 7 answers: same_answer 0.500\n" in text


def test_a_model_is_pushed(own_home, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLX_HOME", str(own_home.path))
    monkeypatch.chdir(own_home.folder)
    push = ("export", run.id, "--card", "--push", "me/mine")
    url = "https://hub.example/me/mine"
    made = create_autospec(HfApi.create_repo, return_value=RepoUrl(url, endpoint=url[:-8]))
    sent = create_autospec(HfApi.upload_folder)
    sent.return_value.commit_url = f"{url}/commit/1"
    monkeypatch.setattr(HfApi, "create_repo", made)
    monkeypatch.setattr(HfApi, "upload_folder", sent)
    assert main([*push, str(tmp_path / "one")]) == 0
    assert f"{url}/commit/1" in capsys.readouterr().out
    assert made.call_args.kwargs["private"]
    assert sent.call_args.kwargs["folder_path"] == tmp_path / "one"
    assert sent.call_args.kwargs["repo_id"] == "me/mine"
    answer = httpx.Response(401, request=httpx.Request("POST", url))
    made.side_effect = HfHubHTTPError("wrong token", response=answer)
    assert main([*push, str(tmp_path / "two")]) == 2
    assert "me/mine was not pushed: wrong token" in capsys.readouterr().err
    own_home.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{find_free_port()}"
    away = own_home.rlx(*push, tmp_path / "three")
    assert away.returncode == 4
    assert f"not pushed to {own_home.environment['HF_ENDPOINT']}: ConnectError" in away.stderr
