"""Locates, checks, fetches and imports the files of a pretrained model, without importing torch."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.errors import EnvironmentFault, SpecError, summarize_error
from rlx.home import locate_cache
from rlx.plugin import expand_path
from rlx.spec import ModelFiles

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


SUFFIX = ".gguf"
MAGIC = b"GGUF"
_IMPORTS = "2"
"""Version of the conversion: part of a folder's name, so that a corrected one imports again."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {"qwen2": rf"{_WORDS}|\p{{N}}{_REST}", "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}"}
"""How some pre-tokenizers cut a text, before their pieces become bytes."""
PRE_TOKENIZERS = ("gpt-2", "smollm", *_PATTERNS)
"""Values of `tokenizer.ggml.pre` that are known, for byte-level vocabularies. transformers ignores
this field, and with another pre-tokenizer most texts become other tokens than those of training."""


def check_gguf_file(file: Path) -> None:
    """Checks that a file can be imported, from its header alone.

    Raises:
        EnvironmentFault: it is damaged, or the package `gguf` is missing.
        SpecError: its pre-tokenizer is unknown, or its dimensions contradict each other.
    """
    header, shapes = _read_header(file)
    if wrong := _describe_misfit(header, shapes):
        raise SpecError(
            f"model.path: {str(file)!r} cannot be imported: {wrong}; fetch another file, or give a "
            "folder in the Hugging Face layout"
        )
    pre = header.get("tokenizer.ggml.pre")
    if header.get("tokenizer.ggml.model") == "gpt2" and pre not in PRE_TOKENIZERS:
        raise SpecError(
            f"model.path: {str(file)!r} names the pre-tokenizer {pre!r}, and rlx knows "
            f"{', '.join(PRE_TOKENIZERS)}; give a folder in the Hugging Face layout"
        )


def import_gguf_file(file: Path) -> Path:
    """Imports a file as float32, unless that has been done, and returns its folder in the cache.

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
        complete = Path(made, "complete")
        _convert(file, complete)
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


def _describe_misfit(header: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Says where the dimensions or the tokenizer of a file contradict each other; "" if nowhere."""
    architecture = header.get("general.architecture")
    tokens = header.get("tokenizer.ggml.tokens") or ()
    if not tokens:
        return "it has no tokenizer"
    if header.get("tokenizer.ggml.model") == "gpt2" and not header.get("tokenizer.ggml.merges"):
        return "its tokenizer of byte pairs has no merges"
    for role in ("bos", "eos"):
        number = header.get(f"tokenizer.ggml.{role}_token_id", 0)
        if not 0 <= number < len(tokens):
            return f"{role}_token_id is {number}, and it has {len(tokens)} tokens"
    embedding = shapes.get("token_embd.weight")
    stated = (len(tokens), header.get(f"{architecture}.embedding_length"))
    if embedding != stated:
        return (
            f"token_embd.weight has the shape {embedding}, and tokens and {architecture}."
            f"embedding_length make {stated}"
        )
    blocks = {name.split(".")[1] for name in shapes if name.startswith("blk.")}
    if len(blocks) != (layers := header.get(f"{architecture}.block_count")):
        return f"it has the tensors of {len(blocks)} layers, and the block_count {layers}"
    return ""


def _read_header(file: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Returns the fields of a file and the shapes of its tensors, rows first, by their names."""
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
        fields = {name: field.contents() for name, field in reader.fields.items()}
        return fields, {one.name: tuple(map(int, reversed(one.shape))) for one in reader.tensors}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise EnvironmentFault(
            f"model.path: {str(file)!r} cannot be read as GGUF ({summarize_error(error)}); fetch "
            "it again"
        ) from error


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    header, _ = _read_header(file)
    place: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **place)
    if header.get("tokenizer.ggml.model") == "gpt2":
        pre_tokenizer = _build_pre_tokenizer(header["tokenizer.ggml.pre"])
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    tokens = header.get("tokenizer.ggml.tokens", ())
    found = tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    for number, (expected, token) in enumerate(zip(tokens, found, strict=True)):
        if token != expected:
            raise EnvironmentFault(
                f"model.path: token {number} of {str(file)!r} is {expected!r}, and transformers "
                f"reads {token!r}; give a folder in the Hugging Face layout"
            )
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **place)
    model.hf_quantizer = None  # its weights are plain tensors by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _build_pre_tokenizer(name: str) -> "PreTokenizer":
    """Builds the pre-tokenizer of a byte-level vocabulary, as llama.cpp defines its name."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = []
    if name in _PATTERNS:
        steps.append(pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated"))
    elif name == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    use_regex = name not in _PATTERNS
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    return pre_tokenizers.Sequence(steps)


HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_SECONDS = 10.0
"""Timeout for listing a model's files on the Hub, in seconds."""
CONFIG = "config.json"
INDEX = ".index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In order of preference; each may be replaced by the index of a sharded checkpoint."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def check_model_files(spec: ModelFiles) -> None:
    """Checks that a model's files are available and valid, without loading or fetching them.

    The Hub is queried only for a name that is not in the cache.

    Raises:
        SpecError: the model is of a kind that rlx cannot train.
        EnvironmentFault: its files are missing, damaged, or unreachable.
    """
    if (file := find_gguf_file(spec)) is not None:
        check_gguf_file(file)
        return
    folder = _find_local_model(spec)
    if folder is None:
        _list_hub_files(spec)
    else:
        _check_folder(folder, spec.path)


def model_folder(spec: ModelFiles) -> Path:
    """Returns the folder with the model's files, imported or downloaded if necessary; raises as
    `check_model_files`."""
    if (file := find_gguf_file(spec)) is not None:
        return import_gguf_file(file)
    folder = _find_local_model(spec) or _fetch_snapshot(spec)
    _check_folder(folder, spec.path)
    return folder


def find_gguf_file(spec: ModelFiles) -> Path | None:
    """Returns the GGUF file that `model.path` names, or None."""
    file = expand_path(spec.path)
    return file if file.suffix == SUFFIX and file.is_file() else None


def compute_model_fingerprint(spec: ModelFiles) -> str:
    """Returns a digest of the names, sizes and modification times of the model's files."""
    files = sorted(f for f in model_folder(spec).iterdir() if f.is_file())
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:20]


def find_local_files(spec: ModelFiles) -> Path | None:
    """Returns the local folder with a model's configuration and tokenizer, or None; without the
    network.

    The weights may be missing.
    """
    folder = expand_path(spec.path)
    if (file := find_gguf_file(spec)) is not None:
        imported = _locate_import(file)
        return imported if imported.is_dir() else None
    if not folder.is_dir():
        snapshot = _find_snapshot(spec)
        if snapshot is None:
            return None
        folder = snapshot
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZERS)
    return folder if has_tokenizer and (folder / CONFIG).is_file() else None


def compute_reference_digest(spec: ModelFiles) -> str:
    """Returns a digest of the contents of a reference model's files; "" if they are not here."""
    file, folder = find_gguf_file(spec), find_local_files(spec)
    files = [file] if file else [folder / CONFIG, *_weight_files(folder)] if folder else []
    parts = [(f.name, _compute_file_digest(f, f.stat().st_mtime_ns)) for f in files if f.is_file()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20] if parts else ""


@lru_cache(maxsize=64)
def _compute_file_digest(file: Path, modified: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def name_reference() -> Iterator[None]:
    """Context manager: what is wrong with a model's files is said of `model.reference`."""
    try:
        yield
    except (SpecError, EnvironmentFault) as error:
        told = re.sub(r"\bmodel\.(path|revision)\b", r"model.reference.\1", str(error))
        raise type(error)(told) from error


def _find_local_model(spec: ModelFiles) -> Path | None:
    """Returns the local folder, or a complete cached snapshot; None if a download is needed."""
    folder = expand_path(spec.path)
    if folder.is_dir():
        if spec.revision is not None:
            raise SpecError(
                f"model.revision: {spec.path!r} is a folder, but a revision needs a name on the "
                "hub; leave model.revision out"
            )
        return folder
    if folder.exists():
        raise EnvironmentFault(
            f"model.path: {spec.path!r} is a file, but no {SUFFIX} file; give a GGUF file, or the "
            "folder of a model in the Hugging Face layout"
        )
    if folder.suffix == SUFFIX:
        raise EnvironmentFault(f"model.path: there is no file {spec.path!r} on this machine")
    if not HUB_NAME.fullmatch(spec.path):
        raise EnvironmentFault(
            f"model.path: there is no folder {spec.path!r} on this machine; give a folder that "
            "contains a model, or a name on the hub such as 'Qwen/Qwen2.5-1.5B-Instruct'"
        )
    from huggingface_hub import is_offline_mode

    snapshot = _find_snapshot(spec)
    missing = ["every file"] if snapshot is None else _find_missing_files(snapshot)
    if missing and is_offline_mode():
        raise EnvironmentFault(
            f"model.path: there is no folder {spec.path!r} on this machine, the hub's cache lacks "
            f"{', '.join(missing)} of {_format_model_name(spec)}, and HF_HUB_OFFLINE is set; "
            "give a local "
            f"folder, fetch it first with `{_fetch_command(spec)}`, or unset HF_HUB_OFFLINE"
        )
    return None if missing else snapshot


def _find_snapshot(spec: ModelFiles) -> Path | None:
    """Returns the snapshot in the Hub's cache that has the configuration, complete or not."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(spec.path, CONFIG, revision=spec.revision)
    except HFValidationError:  # no name on the hub
        return None
    return Path(config).parent if isinstance(config, str) else None


def _list_hub_files(spec: ModelFiles) -> set[str]:
    """Returns the names of the model's files on the Hub; raises if essential files are missing."""
    from huggingface_hub import HfApi, errors

    name = _format_model_name(spec)
    try:
        info = HfApi().model_info(spec.path, revision=spec.revision, timeout=HUB_SECONDS)
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = f"the hub cannot list the files of {name} ({summarize_error(error)}); try again later"
        if isinstance(error, errors.RevisionNotFoundError):
            why = f"the hub has no {name}; leave model.revision out, or give one that exists"
        elif isinstance(error, errors.GatedRepoError) or status == 403:
            why = (
                f"{name} is gated on the hub; accept its terms on its page and run `hf auth "
                "login`, or give a local folder"
            )
        elif isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
            why = (
                f"there is no such folder on this machine, and {name} is not visible on the hub; "
                "check the spelling, run `hf auth login` if it is private, or give a local folder"
            )
        raise EnvironmentFault(f"model.path: {why}") from error
    except Exception as error:  # whatever the hub's HTTP library raises
        raise EnvironmentFault(
            f"model.path: there is no folder {spec.path!r} on this machine, {name} is not in the "
            f"hub's cache, and the hub cannot be reached ({summarize_error(error)}); give a local "
            f"folder, or fetch it where there is a network with `{_fetch_command(spec)}`"
        ) from error
    names = {file.rfilename for file in info.siblings or ()}
    if missing := _find_missing_parts(names):
        raise EnvironmentFault(
            f"model.path: the hub's {name} has no {' and no '.join(missing)}; name a model in the "
            "Hugging Face layout"
        )
    return names


def _fetch_snapshot(spec: ModelFiles) -> Path:
    from huggingface_hub import snapshot_download

    names = _list_hub_files(spec)
    kind = next(w for w in WEIGHTS if {w, w + INDEX} & names)
    stem, suffix = kind.split(".")
    # Some repositories hold the weights in several formats; one is enough.
    wanted = ["*.json", "*.txt", "*.model", "*.jinja", f"{stem}*.{suffix}"]
    try:
        return Path(snapshot_download(spec.path, revision=spec.revision, allow_patterns=wanted))
    except Exception as error:  # whatever the hub's HTTP library raises
        raise EnvironmentFault(
            f"model.path: {_format_model_name(spec)} could not be fetched from the hub "
            f"({summarize_error(error)}); try `{_fetch_command(spec)}`, or give a local folder"
        ) from error


def _check_folder(folder: Path, path: str) -> None:
    try:
        missing = _find_missing_files(folder)
        if missing:
            raise EnvironmentFault(
                f"model.path: {path!r} is an incomplete model: it has no "
                f"{' and no '.join(missing)}; give a folder in the Hugging Face layout, as "
                "written by `save_pretrained` of model and tokenizer"
            )
        config = _read_json_object(folder / CONFIG)
        for file in _weight_files(folder):
            _check_weights(file)
    except OSError as error:
        raise EnvironmentFault(f"model.path: {path!r} cannot be read ({error.strerror})") from error
    if config.get("is_encoder_decoder"):
        raise SpecError(
            f"model.path: {path!r} is an encoder-decoder ({config.get('model_type')}); rlx trains "
            "causal language models"
        )
    if "quantization_config" in config:
        raise SpecError(
            f"model.path: {path!r} is quantised, and quantised weights cannot be trained; use the "
            "model it was made from"
        )


def _check_weights(file: Path) -> None:
    """Checks the safetensors header, which contains the length of the file."""
    from safetensors import SafetensorError, safe_open

    if file.suffix != ".safetensors":
        return
    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise EnvironmentFault(
            f"model.path: the weights in {str(file)!r} are damaged ({summarize_error(error)}); "
            "fetch or save them again"
        ) from error


def _find_missing_files(folder: Path) -> list[str]:
    files = {file.name for file in folder.iterdir() if file.is_file()}
    return _find_missing_parts(files) or [
        f.name for f in _weight_files(folder) if f.name not in files
    ]


def _find_missing_parts(names: Collection[str]) -> list[str]:
    """Returns which of configuration, weights and tokenizer have no file among `names`."""
    needed = {
        CONFIG: (CONFIG,),
        f"weights ({WEIGHTS[0]})": tuple(w + end for w in WEIGHTS for end in ("", INDEX)),
        f"tokenizer ({TOKENIZERS[0]})": TOKENIZERS,
    }
    return [what for what, files in needed.items() if not {*files} & {*names}]


def _weight_files(folder: Path) -> list[Path]:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        if (folder / (name + INDEX)).is_file():
            shards = _read_json_object(folder / (name + INDEX)).get("weight_map", {})
            return [folder / shard for shard in sorted(set(shards.values()))]
    return []


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EnvironmentFault(
            f"model.path: {str(file)!r} is not JSON ({summarize_error(error)}); fetch or save it "
            "again"
        ) from error
    if not isinstance(value, dict):
        raise EnvironmentFault(f"model.path: {str(file)!r} is not a JSON object")
    return value


def _format_model_name(spec: ModelFiles) -> str:
    return f"{spec.path!r}" + (f" at revision {spec.revision!r}" if spec.revision else "")


def _fetch_command(spec: ModelFiles) -> str:
    revision = f" --revision {spec.revision}" if spec.revision else ""
    return f"hf download {spec.path}{revision}"


def share_weights(config: Path) -> None:
    """Gives weights the mode of the configuration beside them: safetensors lets nobody else read
    what it writes."""
    for file in config.parent.glob("*.safetensors"):
        file.chmod(config.stat().st_mode)
