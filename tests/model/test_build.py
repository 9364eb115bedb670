"""Tiny models come from their seed alone; pretrained ones from their files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import STYLES, build_model, make_checkpoint, tokenizer
from rows import each_row
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from rlx.errors import SpecError
from rlx.model import build_policy, find_window
from rlx.spec import PretrainedModelSpec, TinyModelSpec

SMALL = TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1, intermediate_size=32)


def weights(policy):
    return dict(policy.model.named_parameters())


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_seed_decides_the_weights():
    first, again, other = (weights(build_policy(SMALL, seed)) for seed in (3, 3, 4))
    assert same(first, again)
    changed = [name for name in first if not torch.equal(first[name], other[name])]
    # Norms start at one and biases at zero whatever the seed.
    assert changed == [n for n in first if not n.endswith(("norm.weight", ".bias"))]


def test_a_saved_policy_is_a_pretrained_model(tmp_path):
    saved = build_policy(SMALL, 3)
    saved.save(tmp_path)
    loaded = build_policy(PretrainedModelSpec(path=str(tmp_path)), seed=99)
    assert same(weights(saved), weights(loaded))
    assert loaded.end_ids == saved.end_ids
    assert loaded.dialogue.open("nums: 3\n") == saved.dialogue.open("nums: 3\n")


@pytest.fixture(
    scope="module", params=[(f, s) for f in ("qwen2", "llama") for s in ("chatml", "headers")]
)
def checkpoint(request, tmp_path_factory):
    family, style = request.param
    return make_checkpoint(tmp_path_factory.mktemp(family), family, style), STYLES[style]


def test_every_end_token_that_the_files_name_ends_a_turn(checkpoint):
    folder, style = checkpoint
    chat = build_policy(PretrainedModelSpec(path=str(folder)), 0)
    assert chat.tokenizer.pad_token_id is None
    names = [style.closes, style.specials[-1]]
    assert chat.tokenizer.convert_ids_to_tokens(list(chat.end_ids)) == names
    plain = build_policy(PretrainedModelSpec(path=str(folder), chat_template=False), 0)
    assert plain.tokenizer.convert_ids_to_tokens(list(plain.end_ids)) == names[::-1]
    assert (chat.dialogue.end_ids, plain.dialogue.end_ids) == (chat.end_ids, plain.end_ids)


def test_end_tokens_of_all_files_come_together(tmp_path):
    make_checkpoint(tmp_path, "llama", "words")
    for name, ends in (("config", 7), ("generation_config", [5, 0, 6])):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": ends}))
    assert build_policy(PretrainedModelSpec(path=str(tmp_path)), 0).end_ids == (0, 5, 6, 7)


def test_a_model_without_any_end_token_is_refused(tmp_path):
    make_checkpoint(tmp_path, "llama", "words")
    for name in ("config", "generation_config", "tokenizer_config"):
        file = tmp_path / f"{name}.json"
        said = {k: v for k, v in json.loads(file.read_text()).items() if "eos_token" not in k}
        file.write_text(json.dumps({**said, "eos_token_id": None} if name == "config" else said))
    with pytest.raises(SpecError, match="defines an end token"):
        build_policy(PretrainedModelSpec(path=str(tmp_path)), 0)


@each_row("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_the_training_precision_are_those_that_float32_is_rounded_to(
    checkpoint, tmp_path, stored
):
    folder, _ = checkpoint
    shutil.copytree(folder, tmp_path / "stored")
    AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(tmp_path / "stored")
    spec = PretrainedModelSpec(path=str(tmp_path / "stored"))
    rounded = build_policy(spec, 0, dtype=torch.bfloat16).model
    whole = build_policy(spec, 0).model
    for (name, a), (other, b) in zip(
        rounded.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert name == other and a.dtype == torch.bfloat16
        assert torch.equal(a, b.to(torch.bfloat16))
    for a, b in zip(rounded.buffers(), whole.buffers(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


def test_buffers_that_would_be_rounded_too_are_those_of_float32(tmp_path):
    """Gemma scales its embeddings by a buffer, the root of their width."""
    speaks = tokenizer(STYLES["chatml"])
    model = build_model("gemma2", vocab_size=len(speaks), hidden_size=48, head_dim=16)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    speaks.save_pretrained(tmp_path)
    spec = PretrainedModelSpec(path=str(tmp_path))
    rounded = build_policy(spec, 0, dtype=torch.bfloat16).model
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}
    buffers = dict(rounded.named_buffers())
    assert float(buffers["model.embed_tokens.embed_scale"]) == pytest.approx(48**0.5, rel=1e-7)
    for name, buffer in build_policy(spec, 0).model.named_buffers():
        assert torch.equal(buffers[name], buffer)


def test_saved_weights_can_be_read_by_whoever_can_read_their_configuration(tmp_path):
    build_policy(SMALL, 0).save(tmp_path)
    modes = {file.name: file.stat().st_mode for file in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == modes["tokenizer.json"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_ranks_share_the_memory_of_weights_in_the_stored_precision(checkpoint, tmp_path, wanted):
    folder, _ = checkpoint
    shutil.copytree(folder, tmp_path / "stored")
    file = tmp_path / "stored" / "model.safetensors"
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rounded.save_pretrained(file.parent)
    policy = build_policy(PretrainedModelSpec(path=str(file.parent)), 0, dtype=wanted)
    mapped = [
        range(*(int(end, 16) for end in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(file))
    ]
    found = {
        any(parameter.data_ptr() in part for part in mapped)
        for parameter in policy.model.parameters()
    }
    assert found == {wanted == torch.bfloat16}


@each_row(
    ("config", "window"),
    [
        (LlamaConfig(max_position_embeddings=512), None),
        (MistralConfig(max_position_embeddings=512, sliding_window=64), 64),
        (MistralConfig(max_position_embeddings=512, sliding_window=512), None),
        (MistralConfig(max_position_embeddings=512, sliding_window=None), None),
        (Gemma2Config(max_position_embeddings=512, sliding_window=128), 128),
        (Qwen2Config(max_position_embeddings=512, sliding_window=64), None),
    ],
    ids=[
        "none",
        "in every layer",
        "never reached",
        "switched off",
        "in some layers",
        "in no layer",
    ],
)
def test_a_window_does_not_limit_a_dialogue(config, window):
    policy = build_policy(SMALL, 0)
    policy.model.config = config
    assert policy.context_length == 512
    assert find_window(config) == window
