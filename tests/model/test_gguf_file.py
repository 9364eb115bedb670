"""A GGUF file becomes a folder that reads texts as the file's own tokenizer does."""

import re

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from rows import each_row
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.errors import EnvironmentFault, SpecError
from rlx.model import check_model_files
from rlx.model.files import PRE_TOKENIZERS, model_folder
from rlx.model.tokenizer import find_local_files, load_local_dialogue
from rlx.spec import PretrainedModelSpec

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["Ċ Ċ", "Ġ Ġ", "1 2", "a b"]
TOKENS = ["<|end|>", *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|end|>' }}{% endfor %}"
HIDDEN, INNER = 32, 48


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlx" / "gguf"


def write_gguf(file, pre="smollm", *, hidden=HIDDEN, layers=1, tokens=TOKENS, merges=MERGES, eos=0):
    """Writes a llama of one layer with a vocabulary of bytes; what it states may be otherwise."""
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_types([3] + [1] * (len(tokens) - 1))
    if merges:
        writer.add_token_merges(merges)
    writer.add_eos_token_id(eos)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        **{f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
        **dict.fromkeys(("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"), (HIDDEN,)),
    }
    weights = {n: draw.normal(size=s).astype(np.float32) / 8 for n, s in shapes.items()}
    for name, values in weights.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return PretrainedModelSpec(path=str(file)), weights


def test_a_file_is_imported_once_into_a_folder_of_every_tool(tmp_path, cache):
    spec, weights = write_gguf(tmp_path / "model.gguf")
    check_model_files(spec)
    assert find_local_files(spec) is None and not cache.exists()  # a check imports nothing
    folder = model_folder(spec)
    assert folder.parent == cache and [f.name for f in cache.iterdir()] == [folder.name]
    times = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert model_folder(spec) == find_local_files(spec) == folder
    assert times == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(folder)
    embedding = model.get_input_embeddings().weight
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, torch.from_numpy(weights["token_embd"]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<|end|>"
    said = [{"role": "user", "content": "12 ab"}]
    expected = tokenizer.apply_chat_template(said, return_dict=False)
    assert list(load_local_dialogue(spec).open("12 ab")) == expected


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["ĊĊ", "1", "2", "ĠĠ", "5", "Ġ", "ab"]),
        ("gpt-2", ["Ċ", "Ċ", "12", "Ġ", "Ġ", "5", "Ġ", "ab"]),
        ("qwen2", ["ĊĊ", "1", "2", "Ġ", "Ġ", "5", "Ġ", "ab"]),
        ("llama-bpe", ["ĊĊ", "12", "Ġ", "Ġ", "5", "Ġ", "ab"]),
    ],
)
def test_texts_are_cut_as_the_named_pre_tokenizer_cuts_them(tmp_path, pre, pieces):
    assert pre in PRE_TOKENIZERS
    spec, _ = write_gguf(tmp_path / "model.gguf", pre)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(spec))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\n\n12  5 ab")) == pieces


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path, cache):
    spec, _ = write_gguf(tmp_path / "model.gguf", "tekken")
    for refuse in (check_model_files, model_folder):
        with pytest.raises(SpecError, match="the pre-tokenizer 'tekken', and rlx knows gpt-2"):
            refuse(spec)
    assert not cache.exists()


@each_row(
    ("stated", "said"),
    [
        ({"hidden": 64}, f"has the shape ({len(TOKENS)}, {HIDDEN}), and tokens and llama.embedd"),
        ({"layers": 2}, "it has the tensors of 1 layers, and the block_count 2"),
        ({"tokens": TOKENS[:-1]}, f"make ({len(TOKENS) - 1}, {HIDDEN})"),
        ({"tokens": None}, "it has no tokenizer"),
        ({"merges": None}, "its tokenizer of byte pairs has no merges"),
        ({"eos": 999}, f"eos_token_id is 999, and it has {len(TOKENS)} tokens"),
    ],
)
def test_dimensions_and_tokenizer_are_checked_before_the_import(tmp_path, cache, stated, said):
    spec, _ = write_gguf(tmp_path / "model.gguf", **stated)
    for refuse in (check_model_files, model_folder):
        with pytest.raises(SpecError, match=re.escape(said)):
            refuse(spec)
    assert not cache.exists()


def test_another_vocabulary_than_the_file_s_is_refused(tmp_path, cache, monkeypatch):
    spec, _ = write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(
        "transformers.PreTrainedTokenizerFast.convert_ids_to_tokens",
        lambda self, ids: ["?" if i == 5 else TOKENS[i] for i in ids],
    )
    with pytest.raises(EnvironmentFault, match=r"token 5 of .* and transformers reads '\?'"):
        model_folder(spec)
    assert list(cache.iterdir()) == []


def test_a_damaged_or_missing_file_is_named(tmp_path):
    spec, _ = write_gguf(tmp_path / "model.gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(EnvironmentFault, match=r"model\.gguf' cannot be read as GGUF"):
        check_model_files(spec)
    file.write_bytes(b"PK" + b"\0" * 100)
    with pytest.raises(EnvironmentFault, match="does not begin with GGUF"):
        check_model_files(spec)
    file.unlink()
    with pytest.raises(EnvironmentFault, match=r"there is no file '.*model\.gguf'"):
        check_model_files(spec)
