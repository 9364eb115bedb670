"""`rlx plan` as it is called: every experiment of the repository, and what it refuses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.cli import main

FOLDER = Path(__file__).parents[2] / "experiments"
STUDY = sorted([*FOLDER.glob("study/*.yaml"), *FOLDER.glob("study/gpu/*.yaml")])
SOURCES = sorted(FOLDER.glob("sources/*.yaml"))
EXPERIMENTS = [*sorted(FOLDER.glob("*.yaml")), *SOURCES, *STUDY]
if shutil.which("bwrap") is None and "RLX_CI" not in os.environ:
    EXPERIMENTS.remove(FOLDER / "code_tests.yaml")  # its reward needs the sandbox
RLCR = next(path for path in EXPERIMENTS if path.stem == "rlcr")
SOUND = ("rlcr", "rlcr_exact", "rlcr_coupled", "countdown", "kg")
"""Experiments that have nothing to warn of."""
PLANS = """
import contextlib, io, json, os, socket, sys
from functools import partial
from rlx.cli import main

asked = []

def refuse(who, address, *_, **__):
    if getattr(who, "family", None) != socket.AF_UNIX:
        asked.append(str(address))
        raise OSError("no network here")

socket.socket.connect = refuse
socket.getaddrinfo = partial(refuse, None)
os.environ.pop("HF_HUB_OFFLINE")  # which `rlx plan` sets by itself
for path in sys.argv[1:]:
    asked.clear()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", path, "--json"])
    print(json.dumps([path, code, out.getvalue(), err.getvalue(), asked]), flush=True)
"""
"""One process for all experiments, since the imports cost more than most plans."""


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """Exit code, stdout and stderr of `rlx plan`, in a home of its own, 120 columns wide."""
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))

    def run_plan(spec, *arguments, **environment):
        with monkeypatch.context() as patch:
            for name, value in {"COLUMNS": "120", **environment}.items():
                patch.setenv(name, value)
            code = main(["plan", str(spec), *arguments])
        return code, *capsys.readouterr()

    return run_plan


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """What `rlx plan` says of every experiment, by the experiment's path."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "experiments").mkdir()
    for name in ("code_tests", "shop"):
        (folder / "experiments" / name).symlink_to(FOLDER / name)
    homes = {"RLX_HOME": str(folder / "home"), "HF_HOME": str(folder / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", PLANS, *map(str, EXPERIMENTS)],
        cwd=folder,
        env={**os.environ, **homes, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "home").exists()
    return {Path(path): found for path, *found in map(json.loads, done.stdout.splitlines())}


def test_every_experiment_is_planned(planned, subtests):
    for path in EXPERIMENTS:
        with subtests.test(path=path):
            code, out, err, asked = planned[path]
            assert code == 0, err
            assert asked == [], "a plan asks nobody"
            said = json.loads(out)
            assert said["ok"] and said["exit_code"] == 0
            errors = [f for f in said["findings"] if f["severity"] == "error"]
            assert (said["findings"] if path.stem in SOUND else errors) == []
            for phase in said["phases"]:
                assert phase["rows"] and phase["shown"] and phase["groups"]
                weighed = [t for row in phase["rows"] for t in row["tokens"] if t["advantage"]]
                assert bool(weighed) != (path.stem == "distill"), "which has no reward"
            stands_in = "kind: pretrained" in path.read_text()
            assert bool(said["notes"]) == stands_in
            assert all(phase["memory"]["total"] > 0 for phase in said["phases"]), (
                "no files are needed"
            )


def test_an_experiment_without_signal_cannot_learn(shown):
    sets = [f"--set=estimator.{path}tolerance=1000" for path in ("", "confidence.")]
    assert "learns    no: every advantage is 0 in phase answers, joint" in shown(RLCR, *sets)[1]


def test_a_misspelt_span_is_refused(shown):
    code, _, err = shown(RLCR, "--set=rollout.answer.spans=[think, answr]")
    assert code == 2 and "did you mean 'answer'?" in err
