"""Building the model that an experiment names."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from rlx.errors import EnvironmentFault, SpecError
from rlx.model.dialogue import PlainDialogue
from rlx.seeding import derive_seed
from rlx.spec import ModelSpec, Pretrained, Tiny

__all__ = ["Policy", "build_policy"]

GENERIC_TOKENIZERS = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""What files name whose `tokenizer.json` says everything."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A language model and what is needed to talk to it.

    Attributes:
        model: the transformers model, in float32 on the CPU until a learner or sampler moves it.
        tokenizer: its tokenizer, saved beside every export.
        dialogue: text to tokens and back.
        end_ids: tokens that end a turn.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dialogue: PlainDialogue
    end_ids: tuple[int, ...]

    def save(self, folder: Path) -> None:
        """Writes weights, configuration and tokenizer in the Hugging Face layout."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def build_policy(spec: ModelSpec, seed: int) -> Policy:
    """Builds the model before any warm start.

    Args:
        spec: the `model:` section.
        seed: decides the random weights of a tiny model.

    Raises:
        SpecError: a tiny model names a tokenizer that rlx does not ship.
        EnvironmentFault: the files of a pretrained model are not here and cannot be fetched.
    """
    return _tiny(spec, seed) if isinstance(spec, Tiny) else _pretrained(spec)


def _tiny(spec: Tiny, seed: int) -> Policy:
    shipped = files("rlx.model").joinpath("tokenizers")
    definition = shipped.joinpath(f"{spec.tokenizer}.json")
    if not definition.is_file():
        names = sorted(f.name.removesuffix(".json") for f in shipped.iterdir())
        raise SpecError(
            f"model.tokenizer: rlx ships no {spec.tokenizer!r}; there is {', '.join(names)}"
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(definition),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        max_position_embeddings=spec.max_position,
        initializer_range=spec.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        model = Qwen3ForCausalLM(config)
    return _policy(model, tokenizer)


def _pretrained(spec: Pretrained) -> Policy:
    try:
        config = AutoConfig.from_pretrained(spec.path, revision=spec.revision)
        tokenizer = _tokenizer(spec)
        model = AutoModelForCausalLM.from_pretrained(
            spec.path,
            revision=spec.revision,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
        )
    except OSError as error:
        raise EnvironmentFault(
            f"model.path: the files of {spec.path!r} are not on this machine and could not be "
            f"fetched ({str(error).splitlines()[0]}); give a local folder, or fetch it first"
        ) from error
    return _policy(model, tokenizer)


def _tokenizer(spec: Pretrained) -> PreTrainedTokenizerBase:
    named = get_tokenizer_config(spec.path, revision=spec.revision).get("tokenizer_class")
    # AutoTokenizer overrules files that name the generic class: for Qwen2 and others it takes the
    # family's own, which puts another pre-tokenizer in the place of the one that was saved.
    loader = PreTrainedTokenizerFast if named in GENERIC_TOKENIZERS else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(spec.path, revision=spec.revision)
    return tokenizer


def _policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Policy:
    generation = getattr(model, "generation_config", None)
    named = getattr(generation, "eos_token_id", None)
    named = tokenizer.eos_token_id if named is None else named
    ends = tuple(named) if isinstance(named, (list, tuple)) else (named,)
    if ends == (None,):
        raise SpecError("model: neither the model nor its tokenizer names an end token")
    return Policy(model, tokenizer, PlainDialogue(tokenizer, ends), ends)
