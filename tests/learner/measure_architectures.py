"""Takes a step of GRPO and one of RLCR with small models of many architectures, in one process.

    python measure_architectures.py OUT

`test_architectures.py` judges the figures, and architectures.md has a table of them. Every
model is built small from its configuration, saved, loaded by rlx, sampled from and trained. Rewards
come from the tokens of a turn, so that random models have something to learn.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from rlx.importing import speed_up_imports

with speed_up_imports():
    import torch
    import transformers

    from rlx.learner import Learner, join_ranks
    from rlx.model import build_policy, find_window
    from rlx.phase_setup import build_setup
    from rlx.plan import read_spec
    from rlx.reward import RewardEntry, RewardTable
    from rlx.rollout import sample_rollout_trees
    from rlx.sampler import TransformersSampler, copy_policy
    from rlx.spec import PretrainedModelSpec
    from rlx.step import build_scored_rows
from rlx.step import TokenStreams, assign_credit

sys.path.insert(0, str(Path(__file__).parents[1]))
from checkpoints import STYLES, build_model, tokenizer

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SMALL = [
    "rollout.prompts_per_step=2",
    "rollout.num_generations_answer=2",
    "rollout.answer.max_new_tokens=16",
    "mask={strategy: all_response}",
    "model={kind: pretrained, path: anywhere}",
]
RECIPES = {
    "GRPO": ("countdown", 0, SMALL),
    "RLCR": ("rlcr_asked", 1, [
        *SMALL, "rollout.num_generations_confidence=2", "rollout.confidence.max_new_tokens=4",
    ]),
}  # fmt: skip
"""By name: the experiment, its phase, and what makes it small."""

SIZES = {
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
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
STATES = {"mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
SLIDES = {"sliding_window": 24}
MIXED = {**SLIDES, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": {},
    "mistral": SLIDES,
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "gemma": {},
    "gemma2": SLIDES,
    "gemma3_text": MIXED,
    "olmo2": {},
    "olmo3": MIXED,
    "olmoe": EXPERTS,
    "phi": {},
    "phi3": {},
    "gpt2": OLDER,
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 24,
    },
    "gpt_neox": {},
    "gptj": {**OLDER, "rotary_dim": 4},
    "gpt_bigcode": OLDER,
    "gpt_oss": {**EXPERTS, **SLIDES},
    "bloom": {"n_layer": 2, "n_head": 4},
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
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "mamba": {"state_size": 4},
    "bamba": {**STATES, "attn_layer_indices": [1], "mamba_chunk_size": 16},
}
"""By model type: what makes it small, beyond the sizes of all. Windows are below the dialogues."""


def save_model(kind, options, folder, *, chat):
    """Saves a small random model with a tokenizer, with or without a chat template."""
    speaks = tokenizer(STYLES["chatml"])
    if not chat:
        speaks.chat_template = None
    vocabulary = {"vocab_size": len(speaks), "eos_token_id": speaks.eos_token_id}
    build_model(kind, **{**vocabulary, **SIZES, **options}).save_pretrained(folder)
    speaks.save_pretrained(folder)


def score(trees, setup):
    """A reward of every turn from its tokens, by the setup's own names."""

    def entry(name, use, segment):
        raw = sum(segment.token_ids) % 97 / 97 if use.turn == segment.kind else None
        return RewardEntry(name, raw, 1.0, "absent" if raw is None else "scored")

    turns = {
        (t, s): {name: entry(name, use, segment) for name, use in setup.spec.rewards.turn.items()}
        for t, tree in enumerate(trees)
        for s, segment in enumerate(tree.segments)
        if segment.author == "policy"
    }
    return RewardTable(turns, frozenset(), {})


def take_step(setup, policy, sampler, learner):
    """One step on one rank: how far sampler and learner are apart, and what learned."""
    problems = [setup.task.problem("train", n, 0) for n in range(2)]
    with sampler.session() as session:
        trees = sample_rollout_trees(setup.plan, problems, [1, 2], session, policy.dialogue)
    rows = build_scored_rows(setup, trees, score(trees, setup), without=())
    batch = rows.batch
    learned = learner.logprobs(batch, batch.is_own)
    train = assign_credit(rows, TokenStreams(old_logprobs=learned, optional={}), setup.rules)
    return {
        "apart": float((learned - batch.behaviour_logprobs)[batch.is_own].abs().max()),
        "gradient": learner.update(train, setup.spec.loss, 1e-3).grad_norm,
        "longest": int(batch.is_token.sum(dim=1).max()),
    }


def measure(kind, options, recipes, ranks, folder, *, chat):
    """Figures of one architecture: how it is computed, and a step of each setup."""
    save_model(kind, options, folder, chat=chat)
    policy = build_policy(PretrainedModelSpec(path=str(folder)), 0)
    sampler = TransformersSampler(
        copy_policy(policy, torch.float32), max_rows=64, device=torch.device("cpu")
    )
    spec = recipes["GRPO"].spec
    runner = spec.runner.model_copy(update={"zero_stage": 0})
    learner = Learner(policy, runner, spec.optimizer, ranks)
    steps = {}
    for name, setup in recipes.items():
        steps[name] = take_step(setup, policy, sampler, learner)
        sampler.load_each(learner.iterate_weights())
    return {
        "chat": chat,
        "window": find_window(policy.model.config),
        "sampler": sampler.description,
        "learner": learner.chosen.form.name,
        "steps": steps,
    }


def prepare():
    """The recipes, and this process as the only rank."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    recipes = {}
    for name, (experiment, phase, sets) in RECIPES.items():
        spec = read_spec(EXPERIMENTS / f"{experiment}.yaml", sets).spec
        recipes[name] = build_setup(spec.resolve_phase_spec(spec.phases[phase]))
    return recipes, join_ranks(recipes["GRPO"].spec.runner)


def main(out):
    recipes, ranks = prepare()
    found = {}
    for number, (kind, options) in enumerate(MODELS.items()):
        with tempfile.TemporaryDirectory() as folder:
            chat = number % 2 == 0
            found[kind] = measure(kind, options, recipes, ranks, Path(folder), chat=chat)
    out.write_text(json.dumps({"models": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
