"""Imports a model from a GGUF file: once, into a folder in the Hugging Face layout.

transformers reads the weights, the configuration and the chat template, but not which
pre-tokenizer the file names (`tokenizer.ggml.pre`): with another one, most texts become other
tokens than those that the model was trained on. It is set here, and an unknown one is refused.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.errors import EnvironmentFault, SpecError
from rlx.home import locate_cache

if TYPE_CHECKING:  # slow to import
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase

SUFFIX = ".gguf"
MAGIC = b"GGUF"
_IMPORTS = "2"
"""Version of the conversion: part of a folder's name, so that a corrected one imports again."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {"qwen2": rf"{_WORDS}|\p{{N}}{_REST}", "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}"}
"""How some pre-tokenizers cut a text, before their pieces become bytes."""
PRE_TOKENIZERS = ("gpt-2", "smollm", *_PATTERNS)
"""Values of `tokenizer.ggml.pre` that are known, for byte-level vocabularies."""


def check_gguf_file(file: Path) -> None:
    """Checks that a file can be imported, from its header alone.

    Raises:
        EnvironmentFault: it is damaged, or the package `gguf` is missing.
        SpecError: its tokenizer has a pre-tokenizer that rlx does not know.
    """
    header = _read_header(file)
    pre = header.get("tokenizer.ggml.pre")
    if header.get("tokenizer.ggml.model") == "gpt2" and pre not in PRE_TOKENIZERS:
        raise SpecError(
            f"model.path: {str(file)!r} names the pre-tokenizer {pre!r}, and rlx knows "
            f"{', '.join(PRE_TOKENIZERS)}; give a folder in the Hugging Face layout"
        )


def find_imported_folder(file: Path) -> Path | None:
    """Returns the folder that a file has been imported to, or None."""
    folder = _locate_import(file)
    return folder if folder.is_dir() else None


def import_gguf_file(file: Path) -> Path:
    """Imports a file, unless that has been done, and returns its folder in the cache.

    Weights are kept as float32: 4 bytes each, and about half a minute for 135 million.

    Raises:
        EnvironmentFault, SpecError: as `check_gguf_file`, or what is read disagrees with the file's
            own vocabulary.
    """
    folder = _locate_import(file)
    if folder.is_dir():
        return folder
    check_gguf_file(file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="import-") as made:
        _convert(file, Path(made))
        complete = Path(made, "complete")
        complete.mkdir()
        for part in list(Path(made).iterdir()):
            if part != complete:
                shutil.move(part, complete)
        try:
            complete.rename(folder)  # appears whole or not at all
        except OSError:
            if not folder.is_dir():  # and not by another process at the same time
                raise
    return folder


def _locate_import(file: Path) -> Path:
    """The folder of a file as it is now: by its path, size and time of modification."""
    stat = file.stat()
    known = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns} {_IMPORTS}"
    return locate_cache() / "gguf" / hashlib.sha256(known.encode()).hexdigest()[:16]


def _read_header(file: Path) -> dict[str, Any]:
    """Returns the fields of a file, by their names.

    Raises:
        EnvironmentFault: as `check_gguf_file`.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise EnvironmentFault(
            f"model.path: {str(file)!r} is a GGUF file, which the package gguf reads; "
            "pip install 'rlx[gguf]'"
        ) from error
    try:
        with file.open("rb") as opened:
            if opened.read(len(MAGIC)) != MAGIC:
                raise ValueError("it does not begin with GGUF")
        reader = GGUFReader(os.fspath(file))
        return {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EnvironmentFault(
            f"model.path: {str(file)!r} cannot be read as GGUF ({why}); fetch it again"
        ) from error


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    header = _read_header(file)
    place: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **place)
    if header.get("tokenizer.ggml.model") == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = _build_pre_tokenizer(
            header["tokenizer.ggml.pre"]
        )
    _check_vocabulary(tokenizer, header.get("tokenizer.ggml.tokens", ()), file)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **place)
    model.hf_quantizer = None  # its weights are plain tensors by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _build_pre_tokenizer(name: str) -> "PreTokenizer":
    """Builds the pre-tokenizer of a byte-level vocabulary, as llama.cpp defines its name."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in _PATTERNS)
    if name in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level])
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    return byte_level


def _check_vocabulary(
    tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[str], file: Path
) -> None:
    """Checks that every id has the token that the file gives it.

    Raises:
        EnvironmentFault: one has another.
    """
    found = tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    for number, (expected, token) in enumerate(zip(tokens, found, strict=True)):
        if token != expected:
            raise EnvironmentFault(
                f"model.path: token {number} of {str(file)!r} is {expected!r}, and transformers "
                f"reads {token!r}; give a folder in the Hugging Face layout"
            )
