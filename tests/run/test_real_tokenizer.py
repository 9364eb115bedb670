"""A step of each schedule with the real tokenizer and chat template of SmolLM2-135M-Instruct."""

import json
import shutil
from pathlib import Path

import guests
import pytest
from homes import Home
from real_models import make_real_checkpoint
from transformers import PreTrainedTokenizerFast

SPEC = Path(__file__).with_name("real_tokenizer.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The finished run's home and record, its tokenizer, and its steps by the name of their
    phase."""
    folder = tmp_path_factory.mktemp("real")
    home = Home(folder, guests.importable("rlx-guess", folder / "guess"))
    make_real_checkpoint(folder / "model")
    shutil.copy(SPEC, folder / "real.yaml")
    games = [
        {"prompt": f"{low}-{low + 3}?\n", "guess": low + more, "sure": f"0.{2 * more + 1}"}
        for low in range(1, 18)
        for more in range(4)
    ]
    (folder / "games.jsonl").write_text("".join(f"{json.dumps(game)}\n" for game in games))
    record = home.submit("real.yaml")
    names = ("two turns", "single turn", "many turns")
    bodies = [trees for _, trees, _ in home.bodies(record)]
    phases = dict(zip(names, bodies, strict=True))
    return home, record, PreTrainedTokenizerFast.from_pretrained(folder / "model"), phases


def test_what_is_stored_holds_together_and_is_rescored_to_the_bit(run):
    home, record, *_ = run
    home.check_record(record.id)


def list_logprobs(tree, segment):
    """The sampler's log-probability of every token from the root to a segment, None where it was
    not sampled."""
    path = []
    while segment >= 0:
        path.insert(0, tree["segments"][segment])
        segment = path[0]["parent"]
    found = []
    for part in path:
        found += part["behaviour_logprobs"] or [None] * len(part["token_ids"])
    return found


def test_sampler_and_learner_agree(run):
    *_, phases = run
    for phase, trees in phases.items():
        compared = 0
        for tree in trees:
            for row in tree["rows"]:
                sampled = list_logprobs(tree, row["segment"])[row["start"] :]
                for own, old, learns in zip(sampled, row["old_logprobs"], row["mask"], strict=True):
                    if learns and any(row["advantages"]):
                        assert old == pytest.approx(own, abs=5e-5)
                        compared += 1
        assert compared > 20, phase


def test_samples_and_exports_show_what_the_model_read(run):
    home, record, tokenizer, phases = run
    tree = phases["single turn"][0]
    read = tokenizer.decode(tree["segments"][0]["token_ids"])
    shown = home.rlx("samples", record.id, "--step", "2", "--whole").stdout
    assert "".join(read.replace("\n", "⏎").split()) in "".join(shown.split())
    lines = home.rlx("samples", record.id, "--step", "2", "--export", "-").stdout.splitlines()
    row = json.loads(lines[0])
    assert row["input"] == read and row["prompt"] == tree["prompt"]
    (segment,) = (tree["segments"][r["segment"]] for r in tree["rows"] if r["row"] == row["row"])
    assert row["behaviour_logprobs"] == pytest.approx(segment["behaviour_logprobs"])
    assert len(row["old_logprobs"]) == len(row["response_ids"])
