"""Builds or loads the model of an experiment."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlx.errors import EnvironmentFault, SpecError, summarize_error
from rlx.importing import hide_packages
from rlx.model.copies import convert_weights
from rlx.model.dialogue import ModelDialogue
from rlx.model.files import model_folder, name_reference, share_weights
from rlx.model.tokenizer import (
    build_dialogue,
    build_vocabulary_dialogue,
    end_ids,
    find_context_length,
    find_vocabulary_difference,
    load_vocabulary,
    pretrained_tokenizer,
    tiny_tokenizer,
)
from rlx.seeding import derive_seed
from rlx.spec import ModelFiles, ModelSpec, PretrainedModelSpec, TinyModelSpec

CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
"""Names of causal language model classes, as in a configuration's `architectures`."""

LOADING_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    EOFError,
    SafetensorError,
    UnpicklingError,
)
"""Exceptions that transformers and its file readers raise for inconsistent or damaged files."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A language model with its tokenizer and dialogue format.

    Attributes:
        model: on the CPU until a learner or sampler moves it.
        end_ids: tokens that end a turn.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dialogue: ModelDialogue
    end_ids: tuple[int, ...]

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has; its tokenizer may have fewer."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def context_length(self) -> int:
        """Maximum dialogue length in tokens: the positions that the model was trained on."""
        return find_context_length(self.model.config)

    def save(self, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Writes weights (by default the model's own), configuration and tokenizer in the Hugging
        Face layout."""
        state = None if weights is None else dict(weights)
        with hide_packages("deepspeed"):  # accelerate imports it to see that nothing is wrapped
            self.model.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)
        share_weights(folder / "config.json")


def build_policy(
    spec: ModelSpec,
    seed: int,
    tokenizer: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> Policy:
    """Builds the model, before any warm start.

    Weights that are stored in the wanted precision are mapped, not read: the processes of a machine
    share the memory of the files. Others are rounded once.

    Args:
        seed, tokenizer: of a tiny model; the folder is as for `load_vocabulary`.

    Raises:
        SpecError: a pretrained model is of a kind that rlx cannot train.
        EnvironmentFault: the files of the model or its tokenizer are missing or damaged.
    """
    policy = (
        _build_tiny_policy(spec, seed, tokenizer)
        if isinstance(spec, TinyModelSpec)
        else _load_pretrained_policy(spec, dtype)
    )
    convert_weights(policy.model, dtype)
    return policy


def build_reference(spec: ModelFiles, policy: Policy, dtype: torch.dtype) -> Policy:
    """Loads `model.reference`, whose tokenizer must be the policy's.

    Raises:
        SpecError: the tokenizer is another one, or the model of a kind that rlx cannot load.
        EnvironmentFault: as `build_policy`.
    """
    with name_reference():
        model_folder(spec)  # fetched if it has to be
        if difference := find_vocabulary_difference(policy.tokenizer.get_vocab(), spec):
            raise SpecError(f"model.path: the tokenizer is another one: {difference}")
        return _load_pretrained_policy(PretrainedModelSpec(**spec.model_dump()), dtype)


def _build_tiny_policy(spec: TinyModelSpec, seed: int, folder: Path | None) -> Policy:
    vocabulary = load_vocabulary(spec, folder)
    tokenizer = tiny_tokenizer(vocabulary)
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
    dialogue = build_vocabulary_dialogue(vocabulary)
    return Policy(model, tokenizer, dialogue, dialogue.end_ids)


def _load_pretrained_policy(spec: PretrainedModelSpec, dtype: torch.dtype) -> Policy:
    folder = model_folder(spec)
    try:
        config = _load_model_config(folder, spec.path)
        tokenizer = pretrained_tokenizer(folder)
        model, loading = _load_weights(folder, config, dtype)
    except LOADING_ERRORS as error:
        raise EnvironmentFault(
            f"model.path: transformers {transformers.__version__} cannot load {spec.path!r} "
            f"({summarize_error(error)}); save or fetch it again"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise EnvironmentFault(
            f"model.path: the weights of {spec.path!r} lack {len(missing)} of the model's "
            f"parameters, such as {missing[0]}; save or fetch it again"
        )
    ends = end_ids(tokenizer, model.generation_config, model.config)
    dialogue = build_dialogue(tokenizer, ends, chat_template=spec.chat_template)
    return Policy(model, tokenizer, dialogue, dialogue.end_ids)


def _load_weights(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Loads a model with float32 buffers and parameters of a dtype, and what transformers says
    about it."""
    # The model's own attention where it has sinks, biases of its own, or no attention at all.
    has_fast_one = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False)
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation="sdpa" if has_fast_one else "eager",
        trust_remote_code=False,
        output_loading_info=True,
    )
    floats = {b.dtype for b in model.buffers() if b.is_floating_point()}
    if dtype == torch.float32 or floats <= {torch.float32}:
        return model, loading
    del model
    return _load_weights(folder, config, torch.float32)


def _load_model_config(folder: Path, path: str) -> PreTrainedConfig:
    """Loads the configuration of a causal language model that transformers implements."""
    raw_config, _ = PreTrainedConfig.get_config_dict(folder)
    kind = raw_config.get("model_type")
    if kind not in CONFIG_MAPPING:
        why = (
            "needs custom code from its folder, which rlx never runs"
            if "auto_map" in raw_config
            else (
                f"has model type {kind!r}, which transformers {transformers.__version__} does not "
                "support"
            )
        )
        raise SpecError(f"model.path: {path!r} {why}; use a model that transformers implements")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    named = set(config.architectures or ())
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
    if not is_causal or (named and not named & CAUSAL):
        architectures = ", ".join(sorted(named)) or kind
        raise SpecError(f"model.path: {path!r} is not a causal language model but {architectures}")
    return config
