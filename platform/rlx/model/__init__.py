"""Language models: tiny models built by rlx, and pretrained models.

A `Policy` is a transformers model with its tokenizer and dialogue format. Names are imported on
first use, so that `rlx.model.files` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx.importing import speed_up_imports

if TYPE_CHECKING:
    from rlx.model.build import Policy, build_policy
    from rlx.model.dialogue import ChatDialogue, PlainDialogue
    from rlx.model.files import check_model_files, compute_model_fingerprint
    from rlx.model.lora import (
        adapt_policy,
        adapter_weights,
        disable_adapters,
        is_adapted,
        merged_weights,
        save_adapter,
    )
    from rlx.model.tokenizer import (
        find_local_files,
        folder_dialogue,
        load_local_dialogue,
        pretrained_tokenizer,
        tiny_tokenizer,
    )
    from rlx.model.warm_start import warm_start_policy

__all__ = [
    "ChatDialogue",
    "PlainDialogue",
    "Policy",
    "adapt_policy",
    "adapter_weights",
    "build_policy",
    "check_model_files",
    "compute_model_fingerprint",
    "disable_adapters",
    "find_local_files",
    "folder_dialogue",
    "is_adapted",
    "load_local_dialogue",
    "merged_weights",
    "pretrained_tokenizer",
    "save_adapter",
    "tiny_tokenizer",
    "warm_start_policy",
]

_HOME = {
    "Policy": "build",
    "build_policy": "build",
    "ChatDialogue": "dialogue",
    "PlainDialogue": "dialogue",
    "check_model_files": "files",
    "compute_model_fingerprint": "files",
    "adapt_policy": "lora",
    "adapter_weights": "lora",
    "disable_adapters": "lora",
    "is_adapted": "lora",
    "merged_weights": "lora",
    "save_adapter": "lora",
    "find_local_files": "tokenizer",
    "folder_dialogue": "tokenizer",
    "load_local_dialogue": "tokenizer",
    "pretrained_tokenizer": "tokenizer",
    "tiny_tokenizer": "tokenizer",
    "warm_start_policy": "warm_start",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with speed_up_imports():
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
