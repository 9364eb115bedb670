"""SmolLM2-135M-Instruct for tests: its tokenizer on a random body, and the real weights where they
are at hand."""

import lzma
import os
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).with_name("real_tokenizer")
COMPRESSED = "tokenizer.json.xz"
COPIED = ("tokenizer_config.json", "chat_template.jinja")
FETCHED = Path(__file__).parents[1] / "experiments" / "smollm2"
NAMED = "RLX_SMOLLM2"
"""Environment variable: the GGUF file that experiments/smollm2/fetch.py fetches."""


def unpack_tokenizer(folder: Path) -> Path:
    """Writes the tokenizer's files to a folder, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = lzma.decompress((FOLDER / COMPRESSED).read_bytes())
    (folder / "tokenizer.json").write_bytes(text)
    for name in COPIED:
        shutil.copy(FOLDER / name, folder)
    return folder


def make_real_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Saves the real tokenizer with a random body of 400,000 weights, and returns the folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(unpack_tokenizer(folder))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=32,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def find_real_weights() -> Path:
    """Returns the GGUF file; where it is missing the tests that ask are skipped; with RLX_CI=1 they
    fail.

    Nothing is fetched here: a run of the tests asks nobody for 93 MB. `.ci/run` fetches the file
    before, and what was fetched for the experiments is used.
    """
    fetch = runpy.run_path(str(FETCHED / "fetch.py"))
    file = Path(os.environ.get(NAMED) or FETCHED / Path(fetch["MEMBER"]).name)
    if not file.is_file():
        message = f"there is no {file}: python experiments/smollm2/fetch.py, or set {NAMED}"
        if NAMED in os.environ or os.environ.get("RLX_CI") == "1":
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    assert fetch["hash_file"](file) == fetch["DIGEST"], f"{file} is another file"
    return file
