"""RLX_HOME as the URL of an object store, and the folder of this machine that stands for it.

A run writes its files below the working folder, and a copy of them is kept in the store. The
registry records the URL of a run's folder, so that every machine finds it in a working folder of
its own.
"""

import hashlib
import os
import re
from pathlib import Path

from rlx_registry.errors import StoreError

HOME = "RLX_HOME"
RUNS = "runs"
"""Folder of all runs' folders, below a home."""


def is_url(home: str) -> bool:
    """Whether a home is a URL such as `s3://bucket/prefix`."""
    return "://" in home


def locate_cache() -> Path:
    """The folder of this machine's own files of rlx: below XDG_CACHE_HOME, or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(cache)  # noqa: PTH111  (the method may raise)
    return Path(folder, "rlx").absolute()


def locate_working_folder(url: str) -> Path:
    """The folder of this machine that stands for a home."""
    url = url.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", url)[-60:]
    return locate_cache() / "homes" / f"{readable}-{digest}"


def find_folder_url(folder: Path | str) -> str | None:
    """The URL of a folder below the working folder of RLX_HOME; None for any other folder."""
    url = os.environ.get(HOME, "").rstrip("/")
    if not is_url(url) or not Path(folder).is_relative_to(working := locate_working_folder(url)):
        return None
    inside = Path(folder).relative_to(working).as_posix()
    return url if inside == "." else f"{url}/{inside}"


def locate_folder(recorded: str) -> str:
    """The folder of this machine for a run's recorded folder, which is a path or a URL.

    Raises:
        StoreError: it is another URL.
    """
    if not is_url(recorded):
        return recorded
    home, _, name = recorded.rpartition(f"/{RUNS}/")
    if name in ("", ".", "..") or "/" in name:
        raise StoreError(f"{recorded!r} is not the URL of a run's folder")
    return str(locate_working_folder(home) / RUNS / name)
