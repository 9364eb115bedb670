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
STUDY = sorted(FOLDER.glob("study/*.yaml"))
"""Those below `gpu/` are planned in `test_study_on_gpus.py`, as their README says."""
SOURCES = sorted(FOLDER.glob("sources/*.yaml"))
EXPERIMENTS = [*sorted(FOLDER.glob("*.yaml")), *SOURCES, *STUDY]
if shutil.which("bwrap") is None and "RLX_CI" not in os.environ:
    EXPERIMENTS.remove(FOLDER / "code_tests.yaml")  # its reward needs the sandbox
RLCR = next(path for path in EXPERIMENTS if path.stem == "rlcr")
KG = next(path for path in EXPERIMENTS if path.stem == "kg")
MAIN = "import sys; from rlx.cli import main; sys.exit(main())"
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


def rlx(folder, *arguments, program=MAIN, **environment):
    """One `rlx` in a home of its own, where no model is."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=folder,
        env={
            **os.environ,
            "RLX_HOME": str(folder / "home"),
            "HF_HOME": str(folder / "hub"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """What `rlx plan` says of every experiment, by the experiment's path."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "experiments").mkdir()
    for name in ("code_tests", "shop"):
        (folder / "experiments" / name).symlink_to(FOLDER / name)
    done = rlx(folder, *EXPERIMENTS, program=PLANS)
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
            assert [f for f in said["findings"] if f["severity"] == "error"] == []
            for phase in said["phases"]:
                assert phase["rows"] and phase["shown"] and phase["groups"] and phase["kinds"]
                weighed = [t for row in phase["rows"] for t in row["tokens"] if t["advantage"]]
                assert bool(weighed) != (path.stem == "distill"), "which has no reward"
            stands_in = "kind: pretrained" in path.read_text()
            assert bool(said["notes"]) == stands_in
            assert all(phase["memory"]["total"] > 0 for phase in said["phases"]), (
                "no files are needed"
            )


def test_tables_for_people(tmp_path):
    done = rlx(tmp_path, "plan", RLCR, "--set", "phases=[{name: all, steps: 2}]", "--row", "5")
    assert done.returncode == 0, done.stderr
    for said in ("phase all  2 steps", "row 5", "<confidence>", "groups", "gradient weight"):
        assert said in done.stdout
    assert "\nrow 0 " not in done.stdout and "\x1b" not in done.stdout
    told = rlx(tmp_path, "plan", RLCR, "--row", "5", FORCE_COLOR="1").stdout
    assert "\x1b[" in told
    assert "\x1b[3" not in rlx(tmp_path, "plan", RLCR, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_turns_and_what_they_were_answered(tmp_path):
    done = rlx(tmp_path, "plan", KG, "--row", "1")
    assert done.returncode == 0, done.stderr
    for said in ("of up to 4 turns", "turn 1 kg_query", "for the whole rollout", "turn 4"):
        assert said in done.stdout
    assert any(line.split()[1:3] == ["env", "environment"] for line in done.stdout.splitlines())


def test_narrow_terminals_keep_to_their_width(tmp_path):
    done = rlx(tmp_path, "plan", RLCR, "--full", COLUMNS="60")
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 60
    assert "+4." in done.stdout


def test_specs_that_are_refused(tmp_path, subtests):
    for overrides, said in (
        (["rollout.confidence.template='<confidence>'"], "never closes it"),
        (["estimator={name: gae}"], "gae"),
        (["rollout.answer.spans=[think, answr]"], "did you mean 'answer'?"),
    ):
        with subtests.test(overrides=overrides, said=said):
            done = rlx(tmp_path, "plan", RLCR, *(f"--set={value}" for value in overrides))
            assert done.returncode == 2 and done.stderr.lstrip().startswith("error: ")
            assert said in done.stderr


def test_the_verdict_comes_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", str(RLCR)]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = ["rlcr", "learns", "findings", "budget", "disk", "--full"]
    assert [line.split()[0] for line in lines] == heads
    assert lines[1].endswith("yes: groups with advantages: answers 3 of 3, joint 15 of 15")
    assert lines[2].split() == ["findings", "none"] and "130 steps, 730,880 to" in lines[3]
    assert max(map(len, lines)) <= 80


def test_one_confidence_is_a_warning(capsys):
    assert main(["plan", str(RLCR), "--set=rollout.num_generations_confidence=1"]) == 0
    shown = capsys.readouterr()
    assert "warning: rollout.num_generations_confidence is 1" in shown.err
    said = " ".join(shown.out.split())  # lines may be folded
    assert "1 warning, below" in said
    assert "no confidence learns in phase joint" in said


def test_an_experiment_without_signal_cannot_learn(capsys):
    sets = [f"--set=estimator.{path}tolerance=1000" for path in ("", "confidence.")]
    main(["plan", str(RLCR), *sets])
    said = "learns    no: every advantage is 0 in phase answers, joint"
    assert said in capsys.readouterr().out


def test_wrong_arguments_are_said(tmp_path):
    for arguments, said in (
        (["--row", "999"], "--row 999: there are rows 0 to"),
        (["--rows", "some"], "Invalid value"),
    ):
        done = rlx(tmp_path, "plan", RLCR, *arguments)
        assert done.returncode == 2 and said in done.stderr
