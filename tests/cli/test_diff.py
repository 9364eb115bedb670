"""`rlx compare --diff`: what two runs or experiments were made of."""

import json
from pathlib import Path

import pytest

from rlx.cli import main

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
RLCR = EXPERIMENTS / "rlcr.yaml"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def differences(capsys, *names):
    capsys.readouterr()
    assert main(["compare", "--diff", *map(str, names), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sides"] == list(map(str, names))
    return told["differences"]


def queued(capsys, *overrides):
    capsys.readouterr()
    sets = [f"--set={o}" for o in ("tracking.mlflow=null", *overrides)]
    assert main(["submit", str(RLCR), "-q", "--queue", *sets]) == 0
    return capsys.readouterr().out.strip()


def test_a_file_is_like_itself(capsys):
    assert not any(differences(capsys, RLCR, RLCR).values())
    capsys.readouterr()
    assert main(["compare", "--diff", str(RLCR), str(RLCR)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{section}: the same"
        for section in ("seed", "spec", "plugins", "data", "code", "environment")
    ]


def test_two_runs_and_the_file_that_they_came_from(capsys):
    first = queued(capsys)
    second = queued(capsys, "seed=4", "rewards.turn.format.weight=0.3")
    found = differences(capsys, first, second)
    assert found["seed"] == {"seed": [0, 4]}
    assert found["spec"] == {"rewards.turn.format.weight": [0.1, 0.3]}
    assert not any(found[section] for section in ("plugins", "data", "code", "environment"))
    beside = differences(capsys, first, RLCR)
    assert set(beside["spec"]) == {"tracking.mlflow"}
    assert not any(beside[section] for section in ("seed", "plugins", "code"))
