"""The copy of a run's folder in the object store of its home: sent, fetched and removed.

A file is sent again when its size or time differ from those at its last transfer, and fetched again
when the store's copy differs from the one of the last transfer: another machine has sent it then,
and the store wins. Checkpoints are whole or not there: a manifest is sent after all other files,
and what has been removed here is removed from the store after that.
"""

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rlx_registry.errors import StoreError
from rlx_registry.home_urls import find_folder_url
from rlx_registry.supervisors import is_supervisor_alive

__all__ = ["StoredFolder", "fetch_missing_file"]

STATE, LOCK, ARRIVING = ".stored.json", ".stored.lock", ".arriving"
"""Files and a folder of every run's folder that has a copy: what was transferred, a lock for
transfers, and what is being fetched."""
OWN = frozenset({"supervisor.json", "progress.json", "reserve"})
"""Files that mean something on one machine alone."""
STAGING = ".part-"
"""Part of the names of folders that are not complete yet."""
LAST = "manifest.json"
"""File that says that the others of its folder are complete."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A file as it was when it was sent or fetched last.

    Attributes:
        size, time: its size in bytes, and when it was changed, in nanoseconds.
        version: what identifies the store's copy.
    """

    size: int
    time: int
    version: str


class StoredFolder:
    """A run's folder on this machine, and its copy in a store.

    Args:
        folder: the folder, which need not exist.
        url: of the copy.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._opened: tuple[Any, str] | None = None

    @classmethod
    def find(cls, folder: Path | str | None) -> Self | None:
        """Returns the folder with its copy; None if its home is not in a store."""
        url = None if folder is None else find_folder_url(folder)
        return None if folder is None or url is None else cls(Path(folder), url)

    @property
    def is_used_here(self) -> bool:
        """Whether files of it have been sent or fetched by this machine."""
        return (self._folder / STATE).exists()

    def check(self) -> None:
        """Writes a small file and removes it.

        Raises:
            StoreError: the store cannot be reached, or refuses.
        """
        with self._as_store_error("written"):
            store, root = self._open()
            trial = f"{root}/.trial-{os.getpid()}"
            store.pipe_file(trial, b"rlx")
            store.rm_file(trial)

    def send(self) -> None:
        """Sends what has changed since the last transfer, and removes what was removed here.

        Raises:
            StoreError: the store cannot be reached, or refuses.
        """
        with self._transfers() as done:
            here = self._list_own_files()
            changed = [name for name, found in here.items() if not _is_unchanged(found, done, name)]
            last = [name for name in changed if Path(name).name == LAST]
            with self._as_store_error("written"):
                store, root = self._open()
                for names in ([name for name in changed if name not in last], last):
                    self._send_files(store, root, names)
                gone = [name for name in done if name not in here]
                versions = self._list_store(store, root) if changed or gone else {}
                if old := [f"{root}/{name}" for name in gone if name in versions]:
                    store.rm(old)
            for name in gone:
                del done[name]
            for name in changed:
                if name in versions:  # else it was removed here while it was sent
                    done[name] = _Transfer(*here[name], versions[name])

    def fetch(self, *parts: str) -> None:
        """Fetches what is missing here, or was sent by another machine since the last transfer.

        Does nothing while the run's supervisor is a living process of this machine, which alone
        changes the folder then.

        Args:
            parts: names of folders in it, and paths of files in these, that are fetched with the
                files at its top; all if there is an empty one.

        Raises:
            StoreError: the store cannot be reached, or refuses.
        """
        if is_supervisor_alive(str(self._folder)):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._transfers() as done:
            with self._as_store_error("read"):
                store, root = self._open()
                there = self._list_store(store, root)
            there = {name: version for name, version in there.items() if _is_part(name, parts)}
            new = [name for name in there if not self._has(name, done, there[name])]
            with self._as_store_error("read"):
                self._fetch_files(store, root, new)
            for name in new:
                found = (self._folder / name).stat()
                done[name] = _Transfer(found.st_size, found.st_mtime_ns, there[name])
            for name in [n for n in done if _is_part(n, parts) and n not in there]:
                (self._folder / name).unlink(missing_ok=True)  # removed by another machine
                del done[name]

    def remove(self, *parts: str) -> None:
        """Removes folders of the copy from the store; without any, the whole copy.

        Raises:
            StoreError: the store cannot be reached, or refuses.
        """
        with self._as_store_error("written"):
            store, root = self._open()
            there = self._list_store(store, root)
            for part in parts or ("",):
                if any(not part or name.startswith(f"{part}/") for name in there):
                    store.rm(f"{root}/{part}".rstrip("/"), recursive=True)

    def _open(self) -> tuple[Any, str]:
        """The store, and the path of the copy in it."""
        from fsspec.core import url_to_fs

        if self._opened is None:
            found: tuple[Any, str] = url_to_fs(self._url, use_listings_cache=False)
            self._opened = found
        return self._opened

    @contextmanager
    def _as_store_error(self, done: str) -> Iterator[None]:
        try:
            yield
        except ImportError as error:
            raise StoreError(
                f"{self._url} cannot be {done}: {error}; install what its kind of store needs, as "
                "in pip install 'rlx[s3]'"
            ) from error
        except Exception as error:  # each kind of store has errors of its own
            if _is_own_error(error, self._folder):
                raise
            why = " ".join(str(error).split()) or type(error).__name__
            raise StoreError(f"{self._url} cannot be {done}: {why}") from error

    @contextmanager
    def _transfers(self) -> Iterator[dict[str, _Transfer]]:
        """What was transferred before, by path; stores what it has become, one process at a time.

        It is stored after an error too: it holds what was transferred.
        """
        with (self._folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._folder / STATE
            try:
                found = {n: _Transfer(*one) for n, one in json.loads(path.read_text()).items()}
            except (FileNotFoundError, ValueError, TypeError):  # all is transferred again
                found = {}
            try:
                yield found
            finally:
                aside = path.with_name(f"{STATE}.new")
                text = json.dumps({n: [t.size, t.time, t.version] for n, t in found.items()})
                aside.write_text(text)
                aside.replace(path)

    def _list_own_files(self) -> dict[str, tuple[int, int]]:
        """Size and time of each file that has a copy, by path."""
        found: dict[str, tuple[int, int]] = {}
        for place, folders, names in os.walk(self._folder):
            inside = Path(place).relative_to(self._folder)
            folders[:] = [name for name in folders if name[0] != "." and STAGING not in name]
            for name in names:
                if name[0] == "." or name in OWN or STAGING in name:
                    continue
                try:
                    status = os.lstat(Path(place, name))
                except FileNotFoundError:  # just removed
                    continue
                if stat.S_ISREG(status.st_mode):
                    found[(inside / name).as_posix()] = (status.st_size, status.st_mtime_ns)
        return found

    def _list_store(self, store: Any, root: str) -> dict[str, str]:
        """Version of each file of the copy, by path."""
        try:
            found = store.find(root, detail=True)
        except FileNotFoundError:
            return {}
        start = len(root) + 1
        return {path[start:]: _identify(info) for path, info in found.items()}

    def _send_files(self, store: Any, root: str, names: Sequence[str]) -> None:
        """Sends files, but those that are removed meanwhile."""
        there = [name for name in names if (self._folder / name).exists()]
        if there:
            ours = [str(self._folder / name) for name in there]
            store.put(ours, [f"{root}/{name}" for name in there])

    def _fetch_files(self, store: Any, root: str, names: Sequence[str]) -> None:
        """Fetches files; each appears whole."""
        if not names:
            return
        arriving = self._folder / ARRIVING
        shutil.rmtree(arriving, ignore_errors=True)
        try:
            ours = [str(arriving / name) for name in names]
            store.get([f"{root}/{name}" for name in names], ours)
            for name in sorted(names, key=lambda name: Path(name).name == LAST):
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                (arriving / name).replace(self._folder / name)
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    def _has(self, name: str, done: Mapping[str, _Transfer], version: str) -> bool:
        """Whether a file is here in the version of the store, or in a later one of this machine."""
        return name in done and done[name].version == version and (self._folder / name).is_file()


def fetch_missing_file(folder: Path | str, name: str) -> None:
    """Fetches a file of a run's folder if it is missing here and its home is in a store.

    Raises:
        StoreError: the store cannot be reached, or refuses.
    """
    stored = None if Path(folder, name).exists() else StoredFolder.find(folder)
    if stored is not None:
        stored.fetch(name)


def _is_unchanged(found: tuple[int, int], done: Mapping[str, _Transfer], name: str) -> bool:
    return name in done and found == (done[name].size, done[name].time)


def _is_part(name: str, parts: Sequence[str]) -> bool:
    """Whether a file is at the top of the folder, one of some files, or in one of some folders."""
    first, _, inside = name.partition("/")
    return not inside or "" in parts or first in parts or name in parts


def _identify(info: Mapping[str, Any]) -> str:
    """What differs between two versions of a file in a store, as far as the store tells."""
    told = (
        info.get(key) for key in ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
    )
    return f"{info.get('size')} {next((one for one in told if one is not None), '')}"


def _is_own_error(error: Exception, folder: Path) -> bool:
    """Whether an error is of this machine's disk, not of the store."""
    name = getattr(error, "filename", None)
    return isinstance(error, OSError) and isinstance(name, str) and name.startswith(str(folder))
