"""The check of a machine with a GPU, rehearsed on a CPU with small sizes.

Not rehearsed are parts that run other tests of this suite (`tests_…`), profiles that differ from
the two below in their sizes alone, whole experiments of many steps, and parts that need vLLM.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
REHEARSED = {
    "machine": {"compiler", "machine"},
    "learner": {"plain rows, whole logits", "plain rows, chunks"},
    "sampler": {"4 rows, plain", "4 rows, captured"},
    "precision": {"float32", "bfloat16"},
    "kg_1.5b": {"planned_gib", "step 1", "step 2", "step 3"},
    "kill_rlcr_1.5b": {"step 8", "killed", "compared"},
    "speed": {"sampling", "sampling_captured", "plain rows", "trl"},
}
"""Figures that each part has, among others."""


def run_check(out, *arguments, program=("-m", "gpu.check"), **environment):
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *program, "--device", "cpu", "--out", str(out), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def read_parts(out):
    return json.loads(out.read_text())["parts"]


def test_the_hour_is_rehearsed(tmp_path):
    out = tmp_path / "gpu-check.json"
    only = [word for name in REHEARSED for word in ("--only", name)]
    done = run_check(out, *only)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = read_parts(out)
    assert list(parts) == list(REHEARSED)
    for name, expected in REHEARSED.items():
        assert parts[name]["ok"]
        assert expected <= set(parts[name]["figures"]), name
        assert all(parts[name]["figures"].values()), name
    figures = parts["kill_rlcr_1.5b"]["figures"]
    assert 1 <= figures["killed"]["step"] < figures["killed"]["steps"] == 8
    assert figures["compared"]["attempts"] == 2
    assert figures["compared"]["differences"] == []
    assert figures["compared"]["metrics"] > 30
    assert parts["kg_1.5b"]["figures"]["step 3"]["train/grad_norm"] > 0
    done = run_check(out, "--only", "machine")
    assert "passed before" in done.stdout
    assert list(read_parts(out)) == list(REHEARSED)


# The order of things, with parts that do nothing -------------------------------------------------

STAND_INS = Path(__file__).with_name("stand_in_parts.py")
TWO = {"figure 1": {"value": 1}, "figure 2": {"value": 2}}


@pytest.fixture
def check(tmp_path):
    program = (str(STAND_INS), str(tmp_path))
    return lambda *more: run_check(tmp_path / "out.json", *more, program=program)


def test_figures_of_a_part_that_fails_are_kept_and_it_alone_runs_again(check, tmp_path):
    words = ("--only", "bad", "--only", "good", "--only", "skipped")
    done = check(*words)
    assert done.returncode == 1
    first = read_parts(tmp_path / "out.json")
    assert {name: part["ok"] for name, part in first.items()} == {
        "bad": False,
        "good": True,
        "skipped": True,
    }
    assert first["bad"]["figures"] == first["good"]["figures"] == TWO
    assert first["bad"]["why"] == "PartFailedError: exit code 1"
    assert "hum" in first["bad"]["output"]
    assert "ValueError: no luck" in first["bad"]["output"]
    assert first["skipped"]["skipped"] == "nothing here"
    assert "no luck" in done.stdout
    check(*words)
    assert (tmp_path / "good").read_text() == "x"
    assert (tmp_path / "bad").read_text() == "xx"
    check(*words, "--again")
    assert (tmp_path / "good").read_text() == "xx"


def test_a_part_has_one_limit_for_all_its_commands_and_nothing_outlives_it(check, tmp_path):
    assert check("--only", "long").returncode == 1
    part = read_parts(tmp_path / "out.json")["long"]
    assert part["figures"] == TWO
    assert part["why"] == "PartFailedError: no end after 480 s"
    assert not Path(f"/proc/{(tmp_path / 'child').read_text()}").exists()
