"""Atomic folders with a manifest: write to staging, seal with file digests, verify when reading."""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlx.errors import RlxError
from rlx.home import ATTEMPT
from rlx_registry import sync_to_disk

MANIFEST = "manifest.json"
PART = ".part"


class CheckpointError(RlxError):
    """A checkpoint, or another sealed folder, is missing, damaged or incompatible."""


def get_staging_folder(folder: Path) -> Path:
    """The staging folder that `seal_folder` renames to `folder`.

    Every attempt has its own: one that was suspended while it wrote must not mix its files with
    those of an attempt that took over.
    """
    return folder.with_name(f"{folder.name}{PART}-{os.environ.get(ATTEMPT, '0')}")


def clear_staging_folder(folder: Path) -> Path:
    """Creates an empty staging folder and removes those left behind by earlier attempts."""
    aside = get_staging_folder(folder)
    for left in folder.parent.glob(f"*{PART}-*"):
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def seal_folder(folder: Path, written: Collection[str] = ()) -> None:
    """Writes the staging folder's manifest as `write_manifest` does, and renames it to `folder`."""
    aside = get_staging_folder(folder)
    write_manifest(aside, written)
    _move_into_place(aside, folder)


def write_manifest(folder: Path, written: Collection[str] = ()) -> None:
    """Writes the digests of a folder's files into it; raises CheckpointError if one that another
    process has `written` is not there."""
    # By name: the listing of a network disk may be older than a file.
    if missing := [name for name in sorted(written) if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{missing[0]} was written by another rank, but is not in {folder}: its folder must be "
            "on a disk that all machines of the run share"
        )
    names = sorted({*written, *list_files(folder)})
    digests = _compute_digests(folder / name for name in names)
    write_canonical_json(folder / MANIFEST, dict(zip(names, digests, strict=True)))


def list_files(folder: Path) -> list[str]:
    """Paths of all files below a folder, relative to it, in order."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def write_canonical_json(path: Path, content: Any) -> None:
    """Writes JSON with sorted keys, so that equal content gives equal files."""
    path.write_text(json.dumps(content, indent=1, sort_keys=True))


def compute_manifest_digest(folder: Path) -> str:
    """SHA-256 of a sealed folder's manifest, in hex."""
    return _compute_sha256(folder / MANIFEST)


def check_sealed_folder(folder: Path, sha256: str | None = None) -> None:
    """Verifies every file against the manifest, and the manifest against a recorded digest.

    Symbolic links are refused, so no file outside the folder is ever read.

    Raises:
        CheckpointError: a file is missing, changed, not in the manifest, or a symbolic link.
    """
    _refuse_links(folder)
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"its {MANIFEST} cannot be read") from error
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()} - {MANIFEST}
    if odd := sorted(there.symmetric_difference(manifest)):
        raise CheckpointError(f"{odd[0]} is {'missing' if odd[0] in manifest else 'no part of it'}")
    found = _compute_digests(folder / name for name in manifest)
    for (name, digest), now in zip(manifest.items(), found, strict=True):
        if now != digest:
            raise CheckpointError(f"{name} has changed since it was written")
    if sha256 is not None and _compute_sha256(folder / MANIFEST) != sha256:
        raise CheckpointError(f"its {MANIFEST} is not the recorded one")


def copy_sealed_folder(source: Path, target: Path, sha256: str | None = None) -> None:
    """Copies a sealed folder, with hard links where the file system allows, and verifies the copy.

    Raises:
        CheckpointError: the source is damaged, or was removed in favour of newer checkpoints.
    """
    _refuse_links(source)
    aside = clear_staging_folder(target)
    try:
        shutil.copytree(source, aside, copy_function=_link_or_copy, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise CheckpointError(f"{source.name} could not be copied: {error}") from error
    check_sealed_folder(aside, sha256)
    _move_into_place(aside, target)


def _move_into_place(aside: Path, folder: Path) -> None:
    sync_folder(aside)
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    aside.replace(folder)
    sync_to_disk(folder.parent)


def sync_folder(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync_to_disk(path)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or a file system without hard links
        shutil.copyfile(source, target)


def _refuse_links(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            name = "it" if path == folder else str(path.relative_to(folder))
            raise CheckpointError(f"{name} is a symbolic link")


def _compute_digests(files: Iterable[Path]) -> list[str]:
    """Hashes files side by side: a large model's ranks write a file of many gigabytes each."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_compute_sha256, files))


def _compute_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
