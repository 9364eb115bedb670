"""Weights have the names and shapes that a model's files have."""

import torch
from checkpoints import build_model
from rows import each_row
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlx.model import StoredForm


@each_row("kind", ["qwen2", "mixtral", "gpt_neox"])
def test_weights_have_the_form_of_the_models_files(kind, tmp_path):
    built = build_model(kind, num_local_experts=4, tie_word_embeddings=False)
    built.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    own = dict(built.named_parameters())
    assert (own.keys() == written.keys()) == (kind == "qwen2"), "the others are stored otherwise"
    for model in (built, AutoModelForCausalLM.from_pretrained(tmp_path)):
        stored = StoredForm(model).convert(dict(model.named_parameters()))
        assert stored.keys() == written.keys()
        assert all(torch.equal(stored[name], written[name]) for name in written)
