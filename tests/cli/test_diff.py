"""`rlx compare --diff`: what two runs or experiments were made of."""

import json
from pathlib import Path

import pytest

from rlx.cli import main

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"

pytestmark = pytest.mark.usefixtures("folder")


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
