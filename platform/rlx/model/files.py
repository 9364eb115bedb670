"""Which files a pretrained model needs, and whether they can be had. Never imports torch.

A folder is taken as it is; a name on the hub is looked up in the hub's cache first, and the hub is
asked only for what is not there. So a run whose model is here touches no network.
"""

import hashlib
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rlx.errors import EnvironmentFault, SpecError
from rlx.spec import PretrainedModelSpec

__all__ = ["check_model_files", "compute_model_fingerprint", "first_line", "model_folder"]

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_SECONDS = 10.0
"""How long the hub may take to say what it has."""

CONFIG = "config.json"
INDEX = ".index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which they are looked for; each may be an index of several files instead."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def check_model_files(spec: PretrainedModelSpec) -> None:
    """Says, before anything heavy is loaded, what keeps a model from being used here.

    Fetches nothing. Only for a name that the cache does not hold is the hub asked what it has.

    Args:
        spec: the `model:` section.

    Raises:
        SpecError: the model is of a kind that cannot be trained here.
        EnvironmentFault: its files are missing, damaged, or out of reach.
    """
    folder = _find_local_model(spec)
    if folder is None:
        _list_hub_files(spec)
    else:
        _check_folder(folder, spec.path)


def model_folder(spec: PretrainedModelSpec) -> Path:
    """The folder that holds the model's files, fetched from the hub where they are not here.

    Raises:
        SpecError: as `check_model_files`.
        EnvironmentFault: as `check_model_files`.
    """
    folder = _find_local_model(spec) or _fetch_snapshot(spec)
    _check_folder(folder, spec.path)
    return folder


def compute_model_fingerprint(spec: PretrainedModelSpec) -> str:
    """Digest of names, sizes and times of the model's files: it changes when the files do."""
    files = sorted(f for f in model_folder(spec).iterdir() if f.is_file())
    said = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:20]


def _find_local_model(spec: PretrainedModelSpec) -> Path | None:
    """The folder named, or the whole model in the hub's cache; None where it must be fetched."""
    folder = Path(spec.path).expanduser()
    if folder.is_dir():
        if spec.revision is not None:
            raise SpecError(
                f"model.revision: {spec.path!r} is a folder, and revisions belong to names on the "
                "hub; leave model.revision out"
            )
        return folder
    if folder.exists():
        raise EnvironmentFault(f"model.path: {spec.path!r} is a file; name the folder it is in")
    if not HUB_NAME.fullmatch(spec.path):
        raise EnvironmentFault(
            f"model.path: there is no folder {spec.path!r} on this machine; give a folder with a "
            "model in it, or a name on the hub such as 'Qwen/Qwen2.5-1.5B-Instruct'"
        )
    return _find_cached_snapshot(spec)


def _find_cached_snapshot(spec: PretrainedModelSpec) -> Path | None:
    """The snapshot in the hub's cache, if it is whole."""
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
    """Names of the files that the hub has for the model: enough of them to be a model."""
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
    """What the hub's answer means."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no {name}; leave model.revision out, or name one that exists"
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return (
            f"the hub keeps {name} for those who accepted its terms; accept them on its page and "
            "run `hf auth login`, or give a local folder"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return (
            f"there is no such folder on this machine, and the hub shows no {name}; check the "
            "spelling, run `hf auth login` if it is private, or give a local folder"
        )
    return f"the hub cannot say what {name} holds ({first_line(error)}); try again later"


def _fetch_snapshot(spec: PretrainedModelSpec) -> Path:
    from huggingface_hub import snapshot_download

    names = _list_hub_files(spec)
    kind = next(w for w in WEIGHTS if {w, w + INDEX} & names)
    stem, suffix = kind.split(".")
    # Some models carry their weights in several formats; one of them is enough.
    wanted = ["*.json", "*.txt", "*.model", "*.jinja", f"{stem}*.{suffix}"]
    try:
        return Path(snapshot_download(spec.path, revision=spec.revision, allow_patterns=wanted))
    except Exception as error:  # whatever the hub's HTTP library raises
        raise EnvironmentFault(
            f"model.path: {_format_model_name(spec)} could not be fetched from the hub "
            f"({first_line(error)}); try `{_fetch_command(spec)}`, or give a local folder"
        ) from error


def _check_folder(folder: Path, path: str) -> None:
    """Everything that can be told from the files without loading the model."""
    try:
        missing = _find_missing_files(folder)
        if missing:
            raise EnvironmentFault(
                f"model.path: {path!r} is not a whole model: it has no "
                f"{' and no '.join(missing)}; give a folder in the Hugging Face layout, as "
                "`save_pretrained` of model and tokenizer write it"
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
            f"model.path: {path!r} is quantised, and quantised weights cannot be trained; name "
            "the model it was made from"
        )


def _check_weights(file: Path) -> None:
    """Reads the header, which says how long the file must be."""
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
    """What keeps a folder from being a whole model."""
    files = {file.name for file in folder.iterdir() if file.is_file()}
    return _find_missing_parts(files) or [
        f.name for f in _weight_files(folder) if f.name not in files
    ]


def _find_missing_parts(names: Collection[str]) -> list[str]:
    """Which of configuration, weights and tokenizer have no file among `names`."""
    needed = {
        CONFIG: (CONFIG,),
        f"weights ({WEIGHTS[0]})": tuple(w + end for w in WEIGHTS for end in ("", INDEX)),
        f"tokenizer ({TOKENIZERS[0]})": TOKENIZERS,
    }
    return [what for what, files in needed.items() if not {*files} & {*names}]


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a folder that has some."""
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
        raise EnvironmentFault(f"model.path: {str(file)!r} holds no JSON object")
    return value


def _format_model_name(spec: PretrainedModelSpec) -> str:
    return f"{spec.path!r}" + (f" at revision {spec.revision!r}" if spec.revision else "")


def _fetch_command(spec: PretrainedModelSpec) -> str:
    revision = f" --revision {spec.revision}" if spec.revision else ""
    return f"hf download {spec.path}{revision}"


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
