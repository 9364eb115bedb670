"""Locates and checks the files of a pretrained model, without importing torch.

A folder is used as it is. A name on the Hugging Face Hub is looked up in the local cache first, and
the Hub is queried only for missing files, so a run with a cached model needs no network.
"""

import hashlib
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rlx.errors import EnvironmentFault, SpecError
from rlx.model.gguf_import import SUFFIX, check_gguf_file, import_gguf_file
from rlx.plugin import expand_path
from rlx.spec import PretrainedModelSpec

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_SECONDS = 10.0
"""Timeout for listing a model's files on the Hub, in seconds."""

CONFIG = "config.json"
INDEX = ".index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In order of preference; each may be replaced by the index of a sharded checkpoint."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def check_model_files(spec: PretrainedModelSpec) -> None:
    """Checks that a model's files are available and valid, without loading the model.

    Downloads nothing. The Hub is queried only for a name that is not in the cache.

    Args:
        spec: the `model:` section.

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


def model_folder(spec: PretrainedModelSpec) -> Path:
    """Returns the folder with the model's files, imported or downloaded if necessary.

    Raises:
        SpecError: as `check_model_files`.
        EnvironmentFault: as `check_model_files`.
    """
    if (file := find_gguf_file(spec)) is not None:
        return import_gguf_file(file)
    folder = _find_local_model(spec) or _fetch_snapshot(spec)
    _check_folder(folder, spec.path)
    return folder


def find_gguf_file(spec: PretrainedModelSpec) -> Path | None:
    """Returns the GGUF file that `model.path` names, or None."""
    file = expand_path(spec.path)
    return file if file.suffix == SUFFIX and file.is_file() else None


def compute_model_fingerprint(spec: PretrainedModelSpec) -> str:
    """Returns a digest of the names, sizes and modification times of the model's files."""
    files = sorted(f for f in model_folder(spec).iterdir() if f.is_file())
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:20]


def _find_local_model(spec: PretrainedModelSpec) -> Path | None:
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
    return _find_cached_snapshot(spec)


def _find_cached_snapshot(spec: PretrainedModelSpec) -> Path | None:
    """Returns the snapshot in the Hub cache if it is complete."""
    from huggingface_hub import is_offline_mode, try_to_load_from_cache

    config = try_to_load_from_cache(spec.path, CONFIG, revision=spec.revision)
    snapshot = Path(config).parent if isinstance(config, str) else None
    missing = ["every file"] if snapshot is None else _find_missing_files(snapshot)
    if not missing:
        return snapshot
    if is_offline_mode():
        raise EnvironmentFault(
            f"model.path: there is no folder {spec.path!r} on this machine, the hub's cache lacks "
            f"{', '.join(missing)} of {_format_model_name(spec)}, and HF_HUB_OFFLINE is set; "
            "give a local "
            f"folder, fetch it first with `{_fetch_command(spec)}`, or unset HF_HUB_OFFLINE"
        )
    return None


def _list_hub_files(spec: PretrainedModelSpec) -> set[str]:
    """Returns the names of the model's files on the Hub; raises if essential files are missing."""
    from huggingface_hub import HfApi, errors

    name = _format_model_name(spec)
    try:
        info = HfApi().model_info(spec.path, revision=spec.revision, timeout=HUB_SECONDS)
    except errors.HfHubHTTPError as error:
        raise EnvironmentFault(f"model.path: {_describe_hub_error(error, name)}") from error
    except Exception as error:  # whatever the hub's HTTP library raises
        raise EnvironmentFault(
            f"model.path: there is no folder {spec.path!r} on this machine, {name} is not in the "
            f"hub's cache, and the hub cannot be reached ({first_line(error)}); give a local "
            f"folder, or fetch it where there is a network with `{_fetch_command(spec)}`"
        ) from error
    names = {file.rfilename for file in info.siblings or ()}
    if missing := _find_missing_parts(names):
        raise EnvironmentFault(
            f"model.path: the hub's {name} has no {' and no '.join(missing)}; name a model in the "
            "Hugging Face layout"
        )
    return names


def _describe_hub_error(error: Exception, name: str) -> str:
    """Explains an error response of the Hub."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no {name}; leave model.revision out, or give one that exists"
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return (
            f"{name} is gated on the hub; accept its terms on its page and run `hf auth login`, "
            "or give a local folder"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return (
            f"there is no such folder on this machine, and {name} is not visible on the hub; "
            "check the spelling, run `hf auth login` if it is private, or give a local folder"
        )
    return f"the hub cannot list the files of {name} ({first_line(error)}); try again later"


def _fetch_snapshot(spec: PretrainedModelSpec) -> Path:
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
            f"({first_line(error)}); try `{_fetch_command(spec)}`, or give a local folder"
        ) from error


def _check_folder(folder: Path, path: str) -> None:
    """Checks everything that can be checked without loading the model."""
    try:
        missing = _find_missing_files(folder)
        if missing:
            raise EnvironmentFault(
                f"model.path: {path!r} is an incomplete model: it has no "
                f"{' and no '.join(missing)}; give a folder in the Hugging Face layout, as "
                "written by `save_pretrained` of model and tokenizer"
            )
        _check_config(_read_json_object(folder / CONFIG), path)
        for file in _weight_files(folder):
            _check_weights(file)
    except OSError as error:
        raise EnvironmentFault(f"model.path: {path!r} cannot be read ({error.strerror})") from error


def _check_config(config: dict[str, Any], path: str) -> None:
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
            f"model.path: the weights in {str(file)!r} are damaged ({first_line(error)}); fetch "
            "or save them again"
        ) from error


def _find_missing_files(folder: Path) -> list[str]:
    """Returns what a folder lacks to be a complete model."""
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
    """Returns the weight files of a folder; empty if it has none."""
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
            f"model.path: {str(file)!r} is not JSON ({first_line(error)}); fetch or save it again"
        ) from error
    if not isinstance(value, dict):
        raise EnvironmentFault(f"model.path: {str(file)!r} is not a JSON object")
    return value


def _format_model_name(spec: PretrainedModelSpec) -> str:
    return f"{spec.path!r}" + (f" at revision {spec.revision!r}" if spec.revision else "")


def _fetch_command(spec: PretrainedModelSpec) -> str:
    revision = f" --revision {spec.revision}" if spec.revision else ""
    return f"hf download {spec.path}{revision}"


def first_line(error: Exception) -> str:
    """Returns the first line of an error message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def share_weights(config: Path) -> None:
    """Gives weights the mode of the configuration beside them: safetensors lets nobody else read
    what it writes."""
    for file in config.parent.glob("*.safetensors"):
        file.chmod(config.stat().st_mode)
