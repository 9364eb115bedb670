"""Weights have the names and shapes that a model's files have."""

import torch
from rows import each_row
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlx.model import StoredForm

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@each_row("kind", ["qwen2", "mixtral", "gpt_neox"])
def test_weights_have_the_form_of_the_models_files(kind, tmp_path):
    built = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES))
    built.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    own = dict(built.named_parameters())
    assert (own.keys() == written.keys()) == (kind == "qwen2"), "the others are stored otherwise"
    for model in (built, AutoModelForCausalLM.from_pretrained(tmp_path)):
        stored = StoredForm(model).convert(dict(model.named_parameters()))
        assert stored.keys() == written.keys()
        assert all(torch.equal(stored[name], written[name]) for name in written)
