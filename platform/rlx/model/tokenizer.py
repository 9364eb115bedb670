"""Loads a model's tokenizer and dialogue format without modeling code; the bytes of each token."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.errors import EnvironmentFault, SpecError, summarize_error
from rlx.model.dialogue import ChatDialogue, ModelDialogue, PlainDialogue
from rlx.model.files import find_local_files
from rlx.model.vocabulary import Vocabulary
from rlx.plugin import expand_path
from rlx.spec import CLOSED_VOCABULARIES, ModelFiles, ModelSpec, TinyModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERIC_TOKENIZERS = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Generic tokenizer classes, fully described by `tokenizer.json`."""


def load_vocabulary(spec: TinyModelSpec, folder: Path | None = None) -> Vocabulary:
    """Loads the tokenizer of a tiny model; from `folder` (of a run), if a submission stored one
    there.

    Raises:
        EnvironmentFault: the tokenizer's folder is missing or damaged.
    """
    if folder is not None and folder.is_dir():
        return Vocabulary.load_folder(folder)
    name = spec.tokenizer or CLOSED_VOCABULARIES[0]
    if name == "train":
        raise EnvironmentFault(
            f"the trained tokenizer of this run is gone: there is no folder {str(folder)!r}; "
            "submit the experiment again"
        )
    if name == "bytes":
        return Vocabulary.build_bytes()
    if name in CLOSED_VOCABULARIES:
        return Vocabulary.load_shipped(name)
    return Vocabulary.load_folder(expand_path(name))


def tiny_tokenizer(vocabulary: Vocabulary) -> "PreTrainedTokenizerBase":
    """A tiny model's tokenizer for transformers; its own call begins every text as rlx does."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(vocabulary.definition)
    if vocabulary.bos_token_id is not None:
        name = vocabulary.special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, vocabulary.bos_token_id)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **vocabulary.special)


def build_vocabulary_dialogue(vocabulary: Vocabulary) -> PlainDialogue:
    """Builds the dialogue format of a tiny model, without transformers."""
    return PlainDialogue(vocabulary, end_ids(vocabulary))


def pretrained_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer saved in a folder."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    named = get_tokenizer_config(folder).get("tokenizer_class")
    # AutoTokenizer overrides the generic class: for Qwen2 and others it uses the class of the model
    # family, which replaces the saved pre-tokenizer with another one.
    loader = PreTrainedTokenizerFast if named in GENERIC_TOKENIZERS else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, trust_remote_code=False)
    return tokenizer


def build_dialogue(
    tokenizer: "PreTrainedTokenizerBase", ends: tuple[int, ...], *, chat_template: bool
) -> ModelDialogue:
    """Builds a dialogue format: by the tokenizer's template, if it has one and `chat_template` is
    true.

    Raises:
        SpecError: there is no end token, or the template cannot be used.
    """
    chat = chat_template and tokenizer.chat_template is not None
    dialogue = ChatDialogue(tokenizer, ends) if chat else PlainDialogue(tokenizer, ends)
    if not dialogue.end_ids:
        raise SpecError("model: neither the model nor its tokenizer defines an end token")
    return dialogue


def end_ids(*sources: Any) -> tuple[int, ...]:
    """Returns every end token that the tokenizer and configurations name, in order."""
    ends: list[int | None] = []
    for source in sources:
        named = getattr(source, "eos_token_id", None)
        ends += named if isinstance(named, (list, tuple)) else [named]
    return tuple(dict.fromkeys(end for end in ends if end is not None))


def find_context_length(config: Any) -> int:
    """Maximum dialogue length in tokens: the positions that the model was trained on. A sliding
    window is no limit."""
    config = config.get_text_config()
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    return min((limit for limit in limits if limit is not None), default=sys.maxsize)


def find_local_context_length(spec: ModelFiles) -> int:
    """`find_context_length` of a model whose files are on this machine.

    Raises:
        EnvironmentFault: its configuration is missing or damaged.
    """
    from transformers import AutoConfig

    folder = find_local_files(spec)
    try:
        config = AutoConfig.from_pretrained(folder or spec.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise EnvironmentFault(
            f"model.path: the configuration of {spec.path!r} cannot be read "
            f"({summarize_error(error)})"
        ) from error
    return find_context_length(config)


def load_local_dialogue(spec: ModelSpec, tokenizer: Path | None = None) -> ModelDialogue | None:
    """Loads the dialogue format of a model; None if its files are not on this machine.

    Raises:
        SpecError: as `build_dialogue`.
        EnvironmentFault: the files are damaged.
    """
    if isinstance(spec, TinyModelSpec):
        return build_vocabulary_dialogue(load_vocabulary(spec, tokenizer))
    folder = find_local_files(spec)
    return None if folder is None else folder_dialogue(folder, chat_template=spec.chat_template)


def find_vocabulary_difference(ours: Mapping[str, int], reference: ModelFiles) -> str | None:
    """Describes the first token of which the policy and its reference differ; None if there is
    none, or if the reference's files are not on this machine.

    Raises:
        EnvironmentFault: its tokenizer is damaged.
    """
    folder = find_local_files(reference)
    if folder is None:
        return None
    mine = {number: token for token, number in ours.items()}
    theirs = {number: token for token, number in read_vocabulary(folder).items()}
    for number in sorted(mine.keys() | theirs.keys()):
        if mine.get(number) != theirs.get(number):
            own, other = (
                repr(side[number]) if number in side else "none" for side in (mine, theirs)
            )
            return f"token {number} is {own} of the policy and {other} of {reference.path!r}"
    return None


def read_vocabulary(folder: Path) -> Mapping[str, int]:
    """The id of every token of the tokenizer in a folder."""
    try:
        vocabulary: Mapping[str, int] = pretrained_tokenizer(folder).get_vocab()
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise EnvironmentFault(
            f"the tokenizer in {str(folder)!r} cannot be read ({summarize_error(error)}); save or "
            "fetch it again"
        ) from error
    return vocabulary


def folder_dialogue(folder: Path, *, chat_template: bool) -> ModelDialogue:
    """Loads the dialogue format of the model in a folder; raises as `load_local_dialogue`."""
    from transformers import AutoConfig, GenerationConfig

    try:
        tokenizer = pretrained_tokenizer(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        has_generation_config = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if has_generation_config else None
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise EnvironmentFault(
            f"model.path: the tokenizer in {str(folder)!r} cannot be read "
            f"({summarize_error(error)}); save or fetch it again"
        ) from error
    ends = end_ids(tokenizer, generation, config)
    return build_dialogue(tokenizer, ends, chat_template=chat_template)


BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of SentencePiece for a single byte."""


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""


class TokenBytes:
    """The bytes of each token of a transformers tokenizer, also of one that holds part of a
    character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        self._kinds = {step.get("type") for step in (state, *state.get("decoders", ()))}
        self._alphabet: dict[str, int] = {}
        if "ByteLevel" in self._kinds:
            from transformers.convert_slow_tokenizer import bytes_to_unicode

            self._alphabet = {character: byte for byte, character in bytes_to_unicode().items()}

    def __call__(self, token: int) -> bytes | None:
        """Returns the bytes of a token; None for a control token, which is no text."""
        if (added := self._added.get(token)) is not None:
            return None if added.special else added.content.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a model may have more tokens than its tokenizer
            return b""
        if self._alphabet:
            return bytes(self._alphabet[character] for character in piece)
        if "ByteFallback" in self._kinds:
            byte = BYTE_PIECE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(SPACE, " ").encode()
        return str(self._tokenizer.decode([token])).encode()
