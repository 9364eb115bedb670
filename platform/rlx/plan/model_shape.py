"""Model dimensions, read from the spec's options or the model's configuration, without weights.

Nothing here imports torch: every submission checks the room for checkpoints.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlx.spec import ExperimentSpec, Lora, ModelSpec, TinyModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a Llama-style decoder.

    Attributes:
        positions: context length in tokens, ignoring sliding windows; None if the configuration
            does not state it.
        tied: the output embedding is the input embedding.
        small: parameters of a layer's biases and of the norms within its heads.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    positions: int | None
    tied: bool
    small: int = 0

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each of a layer's matrices."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, wide),
            "k_proj": (self.hidden, narrow),
            "v_proj": (self.hidden, narrow),
            "o_proj": (wide, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def parameters(self) -> int:
        """Number of parameters: embeddings, matrices, norms and biases."""
        layer = sum(a * b for a, b in self.linears.values()) + 2 * self.hidden + self.small
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    @property
    def largest(self) -> int:
        """Number of elements of the largest parameter."""
        return max(self.vocabulary * self.hidden, *(a * b for a, b in self.linears.values()))

    def adapters(self, lora: Lora) -> int:
        """Number of parameters of LoRA adapters."""
        every = "all-linear" in lora.targets
        chosen = [d for name, d in self.linears.items() if every or name in lora.targets]
        return self.layers * sum(lora.rank * (a + b) for a, b in chosen)


_QWEN = {"kv_heads": 2, "head_dim": 128, "vocabulary": 151_936, "tied": True}
_LARGE_QWEN = {**_QWEN, "vocabulary": 152_064, "tied": False}
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "0.5B": {**_QWEN, "hidden": 896, "layers": 24, "heads": 14, "intermediate": 4864}
    | {"head_dim": 64},
    "1.5B": {**_QWEN, "hidden": 1536, "layers": 28, "heads": 12, "intermediate": 8960},
    "3B": {**_QWEN, "hidden": 2048, "layers": 36, "heads": 16, "intermediate": 11_008},
    "7B": {**_LARGE_QWEN, "hidden": 3584, "layers": 28, "heads": 28, "intermediate": 18_944}
    | {"kv_heads": 4},
    "14B": {**_LARGE_QWEN, "hidden": 5120, "layers": 48, "heads": 40, "intermediate": 13_824}
    | {"kv_heads": 8},
    "32B": {**_LARGE_QWEN, "hidden": 5120, "layers": 64, "heads": 40, "intermediate": 27_648}
    | {"kv_heads": 8},
}
KNOWN = {
    f"Qwen/Qwen2.5-{size}{kind}": ModelShape(
        **numbers,
        positions=None,
        small=(numbers["heads"] + 2 * numbers["kv_heads"]) * numbers["head_dim"],
    )
    for size, numbers in _SIZES.items()
    for kind in ("", "-Instruct")
} | {
    "experiments/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": ModelShape(
        vocabulary=49_152,
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        positions=8192,
        tied=True,
        small=0,
    )
}
"""Dimensions of the models that the experiments name, from their published configurations: plans
need no files."""


def estimate_checkpoint_bytes(spec: ExperimentSpec, shape: ModelShape) -> int:
    """Bytes of one checkpoint: weights, and for what learns Adam's moments and a float32 copy."""
    lora = getattr(spec.model, "lora", None)
    learned = shape.parameters if lora is None else shape.adapters(lora)
    width, copy = (
        (2, 4) if spec.runner.dtype == "bfloat16" else (4, 4 * (spec.runner.zero_stage > 0))
    )
    policy = width * shape.parameters + (8 + copy) * learned
    return policy + (0 if spec.critic is None else (width + 8 + copy) * shape.parameters)


def load_model_shape(spec: ModelSpec, vocabulary: int | None = None) -> ModelShape | None:
    """Reads the model's dimensions.

    Args:
        spec: the `model:` section.
        vocabulary: number of tokens of a tiny model; None reads it from its tokenizer.

    Returns:
        None if the configuration is not on this machine and not `KNOWN`, or describes another
        architecture.
    """
    from rlx.model import find_local_files, load_vocabulary

    if isinstance(spec, TinyModelSpec):
        return ModelShape(
            vocabulary=vocabulary or len(load_vocabulary(spec)),
            hidden=spec.hidden_size,
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
            positions=spec.max_position,
            tied=True,
            small=2 * spec.head_dim,
        )
    folder = find_local_files(spec)
    if folder is None:
        return KNOWN.get(spec.path)
    try:
        return _build_shape_from_config(
            json.loads((folder / "config.json").read_text(encoding="utf-8"))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build_shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    heads, kind = config["num_attention_heads"], config["model_type"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    small = {"qwen3": 2 * head_dim, "qwen2": (heads + 2 * kv_heads) * head_dim}
    return ModelShape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        positions=config.get("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        small=small.get(kind, 0),
    )
