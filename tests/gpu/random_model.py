"""A folder with a model of the shape of Qwen2.5 and random weights, and a tokenizer of its size.

Profiles run with it on a machine without a network. The tokenizer knows bytes and made-up tokens,
so whatever the model draws has a text.
"""

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlx.plan.memory import KNOWN, ModelShape

LARGE = KNOWN["Qwen/Qwen2.5-1.5B"]
SHAPES = {
    "1.5b": LARGE,
    "small": replace(
        LARGE,
        vocabulary=2000,
        hidden=96,
        layers=2,
        heads=3,
        kv_heads=1,
        head_dim=32,
        intermediate=128,
    ),
}
MEAN_LENGTH = 400
"""Tokens after which a turn ends, on average: so that rows leave their batch, as those of a real
model do."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_qwen(shape: ModelShape, device: str, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """The model on a device, where its random weights are drawn too."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32_768,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(dtype).eval()


def build_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Special tokens, then bytes, then words nobody writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *alphabet]
    names += [f"w{number}" for number in range(size - len(names))]
    own = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def write_qwen(folder: Path, size: str, device: str) -> None:
    """Writes weights in bfloat16, configuration and tokenizer."""
    shape = SHAPES[size]
    model = build_qwen(shape, device, torch.bfloat16)
    last = range(shape.vocabulary - shape.vocabulary // MEAN_LENGTH, shape.vocabulary)
    model.generation_config.eos_token_id = [SPECIAL.index("<|im_end|>"), *last]
    model.save_pretrained(folder)
    build_tokenizer(shape.vocabulary).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # a run in another process needs the memory
