"""A run whose model diverges."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from rlx.sealed_folder import MANIFEST, write_manifest


@pytest.fixture(scope="module")
def diverged(own_home):
    """A run that diverges in its second phase."""
    sets = {
        **own_home.small,
        "phases.1.set": "{optimizer.learning_rate: 1e37, optimizer.max_grad_norm: 1e9}",
        "runner.checkpoint.every": 1,
        "phases.1.steps": 3,
    }
    return own_home.rlx("submit", own_home.yaml, sets=sets)


def add_unsound_checkpoint(root):
    """A sealed checkpoint of step 3 whose weights are NaN."""
    folder = root / "step_000003"
    shutil.copytree(root / "step_000002", folder)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "step": 3}))
    path = folder / "policy" / "mp_rank_00_model_states.pt"
    whole = torch.load(path, weights_only=False)
    for weight in whole["module"].values():
        weight.fill_(torch.nan)
    torch.save(whole, path)
    (folder / MANIFEST).unlink()
    write_manifest(folder)


def test_a_checkpoint_that_is_not_sound_is_refused_and_the_one_before_is_exported(
    own_home, diverged
):
    assert diverged.returncode == 1
    assert "the gradient is not finite: lower optimizer.learning_rate" in diverged.stderr
    run = own_home.run("latest")
    assert not (Path(run.directory) / "model").exists()
    first = own_home.rlx("export", "latest", "first")
    assert first.returncode == 0, first.stderr
    assert "after step 2: first" in first.stdout

    add_unsound_checkpoint(Path(run.directory) / "checkpoints")
    refused = own_home.rlx("export", "latest", "unsound")
    assert refused.returncode == 2
    assert "step_000003 is not sound: its model." in refused.stderr
    assert "name an earlier one of r-0001, RUN@STEP: 3, 2" in refused.stderr
    assert not (own_home.folder / "unsound").exists()
    done = own_home.rlx("export", "latest@2", "sound")
    assert done.returncode == 0, done.stderr
