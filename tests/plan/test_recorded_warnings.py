"""What was warned of when a run was submitted stays with the run."""

import json
from pathlib import Path

from rlx.cli import main

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"


def test_a_warning_is_an_event_of_its_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    sets = ["--set", "tracking.mlflow=null", "--set", "rollout.answer.top_k=5"]
    assert main(["submit", str(RLCR), "-q", "--queue", *sets]) == 0
    run, warned = capsys.readouterr()
    assert main(["logs", run.strip(), "--json"]) == 0
    (event,) = [e for e in json.loads(capsys.readouterr().out) if e["kind"] == "warning"]
    assert event["level"] == "warning"
    assert f"warning: {event['message']}" in warned
    assert main(["status", run.strip()]) == 0
    assert event["message"] in " ".join(capsys.readouterr().out.split())
