"""Language models: tiny models built by rlx, and pretrained models.

A `Policy` is a transformers model with its tokenizer and dialogue format. Names are imported on
first use, so that `rlx.model.files` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx.importing import speed_up_imports

if TYPE_CHECKING:
    from rlx.model.build import Policy, build_policy
    from rlx.model.copies import (
        StoredForm,
        convert_weights,
        copy_model,
        keep_first_layers,
        share_model,
    )
    from rlx.model.dialogue import ChatDialogue, PlainDialogue
    from rlx.model.files import check_model_files, compute_model_fingerprint
    from rlx.model.lora import (
        adapt_policy,
        adapter_weights,
        disable_adapters,
        is_adapted,
        iterate_merged_weights,
        merged_weights,
        save_adapter,
    )
    from rlx.model.texts import (
        TextFault,
        TextSource,
        choose_run_vocabulary,
        choose_vocabulary,
        find_text_faults,
        list_text_sources,
    )
    from rlx.model.tokenizer import (
        build_vocabulary_dialogue,
        find_local_context_length,
        find_local_files,
        folder_dialogue,
        load_local_dialogue,
        load_vocabulary,
        pretrained_tokenizer,
        tiny_tokenizer,
    )
    from rlx.model.vocabulary import Vocabulary
    from rlx.model.warm_start import (
        DemonstrationBatches,
        SharedTraining,
        WarmStartProgress,
        build_demonstration_batches,
        fits_warm_start,
        read_warm_start_losses,
        warm_start_policy,
    )
    from rlx.model.windows import (
        build_attention_mask,
        do_windows_show,
        find_window,
        narrow_windows,
    )

__all__ = [
    "ChatDialogue",
    "DemonstrationBatches",
    "PlainDialogue",
    "Policy",
    "SharedTraining",
    "StoredForm",
    "TextFault",
    "TextSource",
    "Vocabulary",
    "WarmStartProgress",
    "adapt_policy",
    "adapter_weights",
    "build_attention_mask",
    "build_demonstration_batches",
    "build_policy",
    "build_vocabulary_dialogue",
    "check_model_files",
    "choose_run_vocabulary",
    "choose_vocabulary",
    "compute_model_fingerprint",
    "convert_weights",
    "copy_model",
    "disable_adapters",
    "do_windows_show",
    "find_local_context_length",
    "find_local_files",
    "find_text_faults",
    "find_window",
    "fits_warm_start",
    "folder_dialogue",
    "is_adapted",
    "iterate_merged_weights",
    "keep_first_layers",
    "list_text_sources",
    "load_local_dialogue",
    "load_vocabulary",
    "merged_weights",
    "narrow_windows",
    "pretrained_tokenizer",
    "read_warm_start_losses",
    "save_adapter",
    "share_model",
    "tiny_tokenizer",
    "warm_start_policy",
]

_HOME = {
    "Policy": "build",
    "build_policy": "build",
    "StoredForm": "copies",
    "convert_weights": "copies",
    "copy_model": "copies",
    "keep_first_layers": "copies",
    "share_model": "copies",
    "ChatDialogue": "dialogue",
    "PlainDialogue": "dialogue",
    "check_model_files": "files",
    "compute_model_fingerprint": "files",
    "adapt_policy": "lora",
    "adapter_weights": "lora",
    "disable_adapters": "lora",
    "is_adapted": "lora",
    "iterate_merged_weights": "lora",
    "merged_weights": "lora",
    "save_adapter": "lora",
    "TextFault": "texts",
    "TextSource": "texts",
    "choose_run_vocabulary": "texts",
    "choose_vocabulary": "texts",
    "find_text_faults": "texts",
    "list_text_sources": "texts",
    "build_vocabulary_dialogue": "tokenizer",
    "find_local_context_length": "tokenizer",
    "find_local_files": "tokenizer",
    "folder_dialogue": "tokenizer",
    "load_local_dialogue": "tokenizer",
    "load_vocabulary": "tokenizer",
    "pretrained_tokenizer": "tokenizer",
    "tiny_tokenizer": "tokenizer",
    "Vocabulary": "vocabulary",
    "DemonstrationBatches": "warm_start",
    "SharedTraining": "warm_start",
    "WarmStartProgress": "warm_start",
    "build_demonstration_batches": "warm_start",
    "fits_warm_start": "warm_start",
    "read_warm_start_losses": "warm_start",
    "warm_start_policy": "warm_start",
    "build_attention_mask": "windows",
    "do_windows_show": "windows",
    "find_window": "windows",
    "narrow_windows": "windows",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with speed_up_imports():
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
