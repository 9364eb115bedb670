from .build import Policy, build_policy
from .copies import (
    StoredForm,
    convert_weights,
    copy_model,
    keep_first_layers,
    share_model,
)
from .dialogue import ChatDialogue, PlainDialogue
from .files import check_model_files, compute_model_fingerprint
from .lora import (
    adapt_policy,
    adapter_weights,
    disable_adapters,
    is_adapted,
    iterate_merged_weights,
    merged_weights,
    save_adapter,
)
from .texts import (
    TextFault,
    TextSource,
    choose_run_vocabulary,
    choose_vocabulary,
    find_text_faults,
    list_text_sources,
)
from .token_bytes import TokenBytes
from .tokenizer import (
    build_vocabulary_dialogue,
    find_local_context_length,
    find_local_files,
    folder_dialogue,
    load_local_dialogue,
    load_vocabulary,
    pretrained_tokenizer,
    tiny_tokenizer,
)
from .vocabulary import Vocabulary
from .warm_start import (
    DemonstrationBatches,
    SharedTraining,
    WarmStartProgress,
    build_demonstration_batches,
    fits_warm_start,
    is_shipped_warm_start,
    read_warm_start_losses,
    warm_start_policy,
)
from .windows import (
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
    "TokenBytes",
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
    "is_shipped_warm_start",
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
