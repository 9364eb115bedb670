"""Files of a run's folder: its log, its progress, and its artifacts; links are never followed."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from io import FileIO
from typing import Any

from rlx_registry import ENDED, NotFoundError, Registry, RunRecord

LOG = "run.log"
PROGRESS = "progress.json"
LOG_BYTES = 128 * 1024
"""Bytes of a log that one page shows."""
PROGRESS_BYTES = 4096
CHUNK = 256 * 1024


def open_download(registry: Registry, ref: str, path: str) -> FileIO:
    """Opens the log or a recorded artifact of a run, if it is a plain file in the run's folder."""
    record = registry.run(ref)
    if path != LOG and path not in {a.path for a in registry.results.artifacts(record.id)}:
        raise NotFoundError(f"{record.id} has no artifact {path}")
    try:
        return _open_plain_file(record, path)
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read: {error.strerror}") from error


def read_chunks(file: FileIO) -> Iterator[bytes]:
    """Yields the content of a file, and closes it."""
    with file:
        yield from iter(partial(file.read, CHUNK), b"")


def list_run_files(registry: Registry, record: RunRecord) -> list[dict[str, Any]]:
    """The log and the recorded artifacts of a run; `bytes` is None if one cannot be downloaded."""
    recorded = [(a.path, a.kind, a.at) for a in registry.results.artifacts(record.id)]
    files: list[dict[str, Any]] = [
        {"path": path, "kind": kind, "at": at, "bytes": None}
        for path, kind, at in [*recorded, (LOG, "log", None)]
    ]
    for one in files:
        with suppress(OSError), _open_plain_file(record, one["path"]) as file:
            one["bytes"] = os.fstat(file.fileno()).st_size
    return [file for file in files if file["path"] != LOG or file["bytes"] is not None]


def build_log_page(registry: Registry, ref: str, after: int | None = None) -> dict[str, Any]:
    """The end of a run's log, or what follows the byte `after`; while a run goes on, without a last
    line that has no end yet."""
    record = registry.run(ref)
    data: dict[str, Any] = {
        "run": {"id": record.id, "name": record.name, "seed": record.seed}
        | {"status": record.effective_status},
        "path": LOG,
        "lines": [],
        "start": 0,
        "end": after or 0,
        "size": 0,
    }
    with suppress(OSError), _open_plain_file(record, LOG) as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - LOG_BYTES) if after is None else min(after, size)
        end = min(size, start + LOG_BYTES)
        content = os.pread(file.fileno(), end - start, start)
        if start and after is None:  # the rest of a line that the earlier part has
            start += content.find(b"\n") + 1
            content = content[content.find(b"\n") + 1 :]
        if end == size and record.effective_status not in ENDED:
            content = content[: content.rfind(b"\n") + 1]
        lines = content.decode("utf-8", "replace").split("\n")
        data |= {"start": start, "end": start + len(content), "size": size}
        data["lines"] = lines[:-1] if lines[-1] == "" else lines
    return data


def read_run_progress(record: RunRecord) -> dict[str, Any] | None:
    """What a run does now: its stage, `done` of `total`, figures; None if it says nothing."""
    if record.effective_status != "running":
        return None
    wrong = suppress(OSError, ValueError, TypeError, KeyError)
    with wrong, _open_plain_file(record, PROGRESS) as file:
        found = json.loads(file.read(PROGRESS_BYTES))
        return {
            **{name: str(found[name]) for name in ("stage", "note", "doing")},
            **{name: int(found[name]) for name in ("done", "total")},
        }
    return None


def _open_plain_file(record: RunRecord, path: str) -> FileIO:
    """Opens a regular file below a run's folder; no part of its path may be a link."""
    parts = path.split("/")
    if record.directory is None or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise FileNotFoundError(errno.ENOENT, "no such file in the run's folder", path)
    folder = os.open(record.directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            inside = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = inside
        # A pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(parts[-1], flags, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "not a plain file", path)
    return FileIO(descriptor, "r")
