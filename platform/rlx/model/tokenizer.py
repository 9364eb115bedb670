"""A model's tokenizer and the dialogue it holds, without the model.

Nothing here imports modelling code, so what needs texts and tokens alone need not wait for it.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlx.errors import EnvironmentFault, SpecError
from rlx.model.dialogue import ChatDialogue, ModelDialogue, PlainDialogue
from rlx.model.files import CONFIG, TOKENIZERS, first_line
from rlx.spec import ModelSpec, PretrainedModelSpec, TinyModelSpec

__all__ = [
    "build_dialogue",
    "end_ids",
    "find_local_files",
    "folder_dialogue",
    "load_local_dialogue",
    "pretrained_tokenizer",
    "tiny_tokenizer",
]

GENERIC_TOKENIZERS = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""What files name whose `tokenizer.json` says everything."""


def tiny_tokenizer(spec: TinyModelSpec) -> PreTrainedTokenizerBase:
    """The tokenizer of a tiny model, which rlx ships."""
    definition = files("rlx.model").joinpath("tokenizers", f"{spec.tokenizer}.json")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(definition),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def pretrained_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved in a folder."""
    from transformers import AutoTokenizer  # only here: it takes a moment
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    named = get_tokenizer_config(folder).get("tokenizer_class")
    # AutoTokenizer overrules files that name the generic class: for Qwen2 and others it takes the
    # family's own, which puts another pre-tokenizer in the place of the one that was saved.
    loader = PreTrainedTokenizerFast if named in GENERIC_TOKENIZERS else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, trust_remote_code=False)
    return tokenizer


def build_dialogue(
    tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...], *, chat_template: bool
) -> ModelDialogue:
    """How a model with this tokenizer holds a dialogue.

    Args:
        tokenizer: the model's.
        ends: tokens that end a turn.
        chat_template: speak through the tokenizer's template where it has one.

    Raises:
        SpecError: there is no end token, or the template cannot be used.
    """
    chat = chat_template and tokenizer.chat_template is not None
    dialogue = ChatDialogue(tokenizer, ends) if chat else PlainDialogue(tokenizer, ends)
    if not dialogue.end_ids:
        raise SpecError("model: neither the model nor its tokenizer names an end token")
    return dialogue


def end_ids(*sources: Any) -> tuple[int, ...]:
    """Every end token that tokenizer and configurations name, in the order given.

    Generation stops at any of them.
    """
    ends: list[int | None] = []
    for source in sources:
        named = getattr(source, "eos_token_id", None)
        ends += named if isinstance(named, (list, tuple)) else [named]
    return tuple(dict.fromkeys(end for end in ends if end is not None))


def find_local_files(spec: PretrainedModelSpec) -> Path | None:
    """The folder on this machine with a model's configuration and tokenizer; its weights may lack.

    No network is touched.
    """
    folder = Path(spec.path).expanduser()
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            config = try_to_load_from_cache(spec.path, CONFIG, revision=spec.revision)
        except HFValidationError:
            return None
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZERS)
    return folder if has_tokenizer and (folder / CONFIG).is_file() else None


def load_local_dialogue(spec: ModelSpec) -> ModelDialogue | None:
    """The dialogue of the model that `spec` names; None where its files are not on this machine.

    Raises:
        SpecError: as `make_dialogue`.
        EnvironmentFault: the files are damaged.
    """
    if isinstance(spec, TinyModelSpec):
        tokenizer = tiny_tokenizer(spec)
        return build_dialogue(tokenizer, end_ids(tokenizer), chat_template=False)
    folder = find_local_files(spec)
    return None if folder is None else folder_dialogue(folder, chat_template=spec.chat_template)


def folder_dialogue(folder: Path, *, chat_template: bool) -> ModelDialogue:
    """The dialogue of the model whose configuration and tokenizer a folder holds.

    Raises:
        SpecError, EnvironmentFault: as `dialogue_of`.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        tokenizer = pretrained_tokenizer(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        said = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if said else None
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise EnvironmentFault(
            f"model.path: the tokenizer in {str(folder)!r} cannot be read ({first_line(error)}); "
            "save or fetch it again"
        ) from error
    ends = end_ids(tokenizer, generation, config)
    return build_dialogue(tokenizer, ends, chat_template=chat_template)
