"""Causal language models of transformers, each tried: sampled from and trained by GRPO and RLCR.

`measure_architectures.py` takes the steps; here they are judged, and the table in the docs is
compared with them.
"""

import json
import os
import subprocess
import sys

import pytest
from architecture_table import MEASURE, build_table, read_table

QUIET = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONWARNINGS": "ignore",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    out = tmp_path_factory.mktemp("architectures") / "measured.json"
    done = subprocess.run(
        [sys.executable, str(MEASURE), str(out)],
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())["models"]


def test_every_architecture_learns_by_grpo_and_by_rlcr_as_it_is_sampled(models):
    """At least 25, with and without a chat template, before and after an update."""
    assert len(models) >= 25
    assert {found["chat"] for found in models.values()} == {True, False}
    for kind, found in models.items():
        assert list(found["steps"]) == ["GRPO", "RLCR"]
        for recipe, step in found["steps"].items():
            assert step["gradient"] > 0 and step["apart"] <= 1e-4, (kind, recipe)


def test_dialogues_are_longer_than_windows(models):
    windowed = {kind: found for kind, found in models.items() if found["window"]}
    assert {"mistral", "gemma3_text", "olmo3", "gpt_oss"} <= windowed.keys()
    for found in windowed.values():
        assert min(step["longest"] for step in found["steps"].values()) > found["window"] + 4


def test_the_docs_have_the_table(models):
    assert read_table() == build_table(models), "run `make docs`"
