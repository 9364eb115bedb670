"""Checkpoints that go from one rank to two and back, and from one ZeRO stage to another.

`measure_checkpoints.py` saves and loads, twice for each number of ranks; here it is judged.
"""

import json
from pathlib import Path

import pytest
import torch
from torchrun import start_ranks

from rlx.checkpoint import convert_checkpoint
from rlx.errors import RlxError
from rlx.learner.universal import convert_checkpoints, load_consolidated_weights
from rlx.sealed_folder import MANIFEST, check_sealed_folder

SAVED = ["0-whole", "1-whole", "2-whole", "3-whole", "1-adapters", "3-adapters"]
FRESH = ["3-whole", "1-adapters"]
GOES_ON = [(saved, "carried") for saved in SAVED] + [(saved, "fresh") for saved in FRESH]
SCRIPT = Path(__file__).with_name("measure_checkpoints.py")


def both(folder, what):
    """One rank and two, side by side: what they take is mostly time to start."""
    processes = [
        start_ranks(ranks, SCRIPT, folder, what, log=folder / f"log-{what}-{ranks}")
        for ranks in (1, 2)
    ]
    codes = [process.wait() for process in processes]
    logs = "".join(file.read_text()[-4000:] for file in folder.glob(f"log-{what}-*"))
    assert codes == [0, 0], logs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("universal")
    both(folder, "save")
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    both(folder, "load")
    return {ranks: json.loads((folder / f"on-{ranks}.json").read_text()) for ranks in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2], ids=["on one rank", "on two ranks"])
@pytest.mark.parametrize(("saved", "moments"), GOES_ON)
def test_what_other_ranks_saved_goes_on_as_if_unbroken(loaded, ranks, saved, moments):
    found = loaded[ranks][saved][moments]
    assert found["losses"] <= 1e-6
    assert found["weights"] <= 1e-7
    assert found["critic"] <= 1e-7


def test_every_stage_consolidates_to_the_same_weights(folder):
    one, *others = (
        {n: w.float() for n, w in load_consolidated_weights(folder / name / "policy").items()}
        for name in ("1-1-whole", "1-0-whole", "1-2-whole", "1-3-whole", "2-3-whole")
    )
    for other in others:
        assert one.keys() == other.keys()
        for name, weight in one.items():
            torch.testing.assert_close(other[name], weight, rtol=1e-5, atol=1e-5)
    adapters = load_consolidated_weights(folder / "2-3-adapters" / "policy")
    assert any(".base_layer." in name for name in adapters)
    assert any(".lora_A." in name for name in adapters)


def test_a_conversion_is_made_once_and_again_where_it_is_damaged(folder, tmp_path):
    source = folder / "1-3-whole"
    (source / MANIFEST).write_text("{}")  # another would have another digest
    made = convert_checkpoint(source, tmp_path)
    check_sealed_folder(made)
    assert [path.name for path in tmp_path.iterdir()] == [made.name]
    first = (made / MANIFEST).stat().st_mtime_ns
    assert convert_checkpoint(source, tmp_path) == made
    assert (made / MANIFEST).stat().st_mtime_ns == first
    states = next(made.rglob("exp_avg.pt"))
    states.write_bytes(states.read_bytes()[:-1])
    assert convert_checkpoint(source, tmp_path) == made
    check_sealed_folder(made)


def test_what_cannot_be_converted_is_said(folder, tmp_path):
    with pytest.raises(RlxError, match="resume with those that wrote it"):
        convert_checkpoints([folder / "1-0-whole" / "policy"], tmp_path)
