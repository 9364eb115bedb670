"""How rlx samples from and trains small models of many architectures: the table architectures.md.

Sampler and learner compare themselves with the model's own forward pass when they choose a way, so
nothing is trained here.
"""

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from rlx.learner import PackedPolicy, Ranks
from rlx.learner.forward import choose_form
from rlx.sampler.engine import choose_decoder

SIZES = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
OLDER = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
SLIDES = {"sliding_window": 24}
MIXED = {**SLIDES, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": {},
    "mistral": SLIDES,
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gemma": {},
    "gemma2": SLIDES,
    "gemma3_text": MIXED,
    "olmo2": {},
    "olmo3": MIXED,
    "olmoe": EXPERTS,
    "phi": {},
    "phi3": {},
    "gpt2": OLDER,
    "gpt_neox": {},
    "gptj": {**OLDER, "rotary_dim": 4},
    "gpt_bigcode": OLDER,
    "gpt_oss": {**EXPERTS, **SLIDES},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "starcoder2": {},
    "stablelm": {},
    "granite": {},
    "cohere": {},
    "cohere2": MIXED,
    "glm4": {},
    "deepseek_v3": {
        **EXPERTS,
        **LATENT,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "smollm3": {},
    "exaone4": MIXED,
    "nemotron": {},
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
}
"""By model type: what makes it small, beyond the sizes."""


def build_model(kind, options):
    """A small random model with the attention that rlx loads it with."""
    config = CONFIG_MAPPING[kind](**{**SIZES, **options})
    has_fast_one = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False)
    torch.manual_seed(0)
    attention = "sdpa" if has_fast_one else "eager"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def measure_architectures():
    """By model type, how the sampler computes and which form the learner takes."""
    here, found = Ranks(0, 1, torch.device("cpu")), {}
    for kind, options in MODELS.items():
        sampler = choose_decoder(build_model(kind, options))().description
        learner = choose_form(PackedPolicy(build_model(kind, options)), here).form.name
        found[kind] = {"sampler": sampler, "learner": learner}
    return found
