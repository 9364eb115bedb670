"""Small checkpoints made on the spot: a byte-level BPE, a chat template, random weights.

The templates are our own, in the manner of the families that they are named after.
"""

from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlx.model.dialogue import PlainDialogue


@dataclass(frozen=True)
class Style:
    """How a family of models speaks.

    Attributes:
        template: in Jinja.
        specials: tokens that stand for no text; the last one is the document's end.
        closes: token with which a turn ends, as text; "" where the template writes none.
        bos: token that opens a document, as text; None without one.
        system: whether the template takes system messages.
    """

    template: str
    specials: tuple[str, ...]
    closes: str
    bos: str | None = None
    system: bool = True


ONE_BY_ONE = """
{%- for m in messages -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('users and models take turns') }}
{%- endif -%}
"""
STYLES = {
    # A system message of its own where none is given; a line break after the end of every turn.
    "chatml": Style(
        "{%- if messages[0]['role'] != 'system' -%}"
        "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif -%}"
        "{%- for m in messages -%}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}",
        ("<|im_start|>", "<|im_end|>", "<|doc_end|>"),
        "<|im_end|>",
    ),
    # Headers, trimmed contents, and a token that opens the document.
    "headers": Style(
        "{{ bos_token }}{%- for m in messages -%}"
        "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|head|>assistant<|/head|>\n\n' }}{%- endif -%}",
        ("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|doc_end|>"),
        "<|eot|>",
        "<|begin|>",
    ),
    # Brackets of plain text; a turn ends the way a document does; no system messages.
    "brackets": Style(
        "{{ bos_token }}" + ONE_BY_ONE + "{%- if m['role'] == 'user' -%}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{%- else -%}{{ ' ' + m['content'] + eos_token }}{%- endif -%}{%- endfor -%}",
        ("<s>", "</s>"),
        "</s>",
        "<s>",
        system=False,
    ),
    # Another name for the assistant; system messages are dropped without a word.
    "turns": Style(
        "{{ bos_token }}{%- for m in messages if m['role'] != 'system' -%}"
        "{%- set who = 'model' if m['role'] == 'assistant' else m['role'] -%}"
        "{{ '<turn>' + who + '\n' + m['content'] | trim + '</turn>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<turn>model\n' }}{%- endif -%}",
        ("<bos>", "<turn>", "</turn>", "<eos>"),
        "</turn>",
        "<bos>",
        system=False,
    ),
    # Nothing but words; the model's end token is not the template's business.
    "words": Style(
        "{%- for m in messages -%}{{ m['role'] + ': ' + m['content'] + '\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}",
        ("<|doc_end|>",),
        "",
    ),
}
HEARD = [
    "nums: 3 17 20\ntarget: 99\n<think>17+3=20\n20*4=80\n</think><answer>(17+3)*4</answer>",
    "sure?\n<analysis>20-3=17</analysis><confidence>0.7</confidence>",
    "system user assistant model You help. [INST] [/INST] Say how sure you are of the answer.",
]


def _train(heard, size, specials, pre_tokenizer):
    """A byte-level BPE."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(heard, trainer)
    return bpe


def train_bytewise(heard, size=290, apart=None):
    """A dialogue over a byte-level BPE, whose tokens reach across everything but `apart`."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if apart is not None:
        split = pre_tokenizers.Split(Regex(apart), "isolated")
        whole = pre_tokenizers.Sequence([split, whole])
    bpe = _train(heard, size, ["<eos>"], whole)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    return PlainDialogue(fast, (fast.eos_token_id,))


def tokenizer(style):
    """A byte-level BPE of about 400 tokens that wears the style's template."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = _train(HEARD * 10, 400, style.specials, plain)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=style.bos, eos_token=style.specials[-1]
    )
    fast.chat_template = style.template
    return fast


SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_model(kind, **options):
    """A small random model of one of transformers' model types."""
    config = CONFIG_MAPPING[kind](**{**SIZES, **options})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def make_checkpoint(folder, family, style):
    """Saves model and tokenizer to `folder`, in the Hugging Face layout; returns the folder.

    The tokenizer names the document's end token; the model's files name the turn's as well.
    """
    speaks = tokenizer(STYLES[style])
    ends = speaks.convert_tokens_to_ids([STYLES[style].closes or speaks.eos_token])
    model = build_model(
        family,
        vocab_size=len(speaks),
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
        max_position_embeddings=512,
        initializer_range=0.08,
        pad_token_id=None,
        bos_token_id=speaks.bos_token_id,
        eos_token_id=speaks.eos_token_id,
    )
    model.generation_config.eos_token_id = sorted({*ends, speaks.eos_token_id})
    model.save_pretrained(folder)
    speaks.save_pretrained(folder)
    return folder
