"""The copy of a run's folder in the object store of its home: sent, fetched and removed.

A file is sent again when its size or time differ from those at its last transfer, and fetched again
when the store's copy differs from the one of the last transfer: another machine has sent it then,
and the store wins. Checkpoints are whole or not there: a manifest is sent after all other files,
and removed before them.
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

STATE, LOCK, ARRIVING = ".stored.json", ".stored.lock", ".arriving"
"""Files and a folder of every run's folder that has a copy: what was transferred, a lock for
transfers, and what is being fetched."""
OWN = frozenset({"supervisor.json", "progress.json", "reserve"})
"""Files that mean something on one machine alone."""
STAGING = ".part-"
"""Part of the names of folders that are not complete yet."""
LAST = "manifest.json"
"""File that says that the others of its folder are complete."""
FIRST = "spec.json"
"""File that every copy has."""
CHECKPOINTS = "checkpoints"
"""Folder of a run's folder from which a run removes files."""
SENDING = "sending "
"""Begins the version of a file whose sending has not been seen to end; the one before follows."""


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
    def exists(self) -> bool:
        """Whether the store has a copy.

        Raises:
            StoreError: the store cannot be reached, or refuses.
        """
        with self._as_store_error("read"):
            store, root = self._open()
            return bool(self._list_store(store, root))

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

    def send(self, *, own: bool = False) -> None:
        """Sends what has changed since the last transfer, but nothing that another machine has sent
        meanwhile.

        Args:
            own: whether the run is, or was last, in this machine's hands. Only then are files at
                the top sent again, such as its log, and checkpoints that were removed here removed
                from the store.

        Raises:
            StoreError: the store cannot be reached, or refuses.
        """
        with self._transfers() as done:
            here = self._list_own_files()
            changed = [name for name, found in here.items() if not _is_unchanged(found, done, name)]
            gone = [n for n in done if own and n not in here and n.startswith(f"{CHECKPOINTS}/")]
            if not (changed or gone):
                return
            with self._as_store_error("written"):
                store, root = self._open()
                there = self._list_store(store, root)
                mine = [n for n in (*changed, *gone) if n not in there or _is_ours(n, done, there)]
                sent = [n for n in mine if n in here and (own or "/" in n or n not in there)]
                for name in sent:
                    done[name] = _Transfer(*here[name], f"{SENDING}{there.get(name, '')}")
                self._write_state(done)
                for last in (False, True):
                    names = [name for name in sent if (Path(name).name == LAST) == last]
                    self._send_files(store, root, names)
                old = [name for name in gone if name in mine and name in there]
                for last in (True, False):
                    if some := [n for n in old if (Path(n).name == LAST) == last]:
                        store.rm([f"{root}/{name}" for name in some])
                versions = self._list_store(store, root)
            for name in gone:
                del done[name]
            for name in sent:
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
            if FIRST not in there:  # the copy is gone, not some of its files
                return
            here = self._list_own_files()
            for name in [n for n in done if _is_part(n, parts) and n not in there]:
                if name not in here or _is_unchanged(here[name], done, name):
                    (self._folder / name).unlink(missing_ok=True)  # removed by another machine
                    del done[name]

    def remove(self, *parts: str) -> None:
        """Removes folders of the copy from the store; without any, the whole copy.

        Raises:
            StoreError: the store cannot be reached, or refuses.
        """
        with self._as_store_error("written"):
            store, root = self._open()
            for place in [f"{root}/{part}" for part in parts] or [root]:
                if store.exists(place):
                    store.rm(place, recursive=True)

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
            except FileNotFoundError:
                found = {}
            except (ValueError, TypeError, AttributeError) as error:
                raise StoreError(
                    f"{path} cannot be read ({error}): what this machine has not sent is unknown; "
                    "remove the file to take the store's copy"
                ) from error
            try:
                yield found
            finally:
                self._write_state(found)

    def _write_state(self, done: Mapping[str, _Transfer]) -> None:
        aside = self._folder / f"{STATE}.new"
        aside.write_text(json.dumps({n: [t.size, t.time, t.version] for n, t in done.items()}))
        aside.replace(self._folder / STATE)

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
        listed = {path[start:]: _identify(info) for path, info in found.items()}
        return {name: version for name, version in listed.items() if _is_plain(name)}

    def _send_files(self, store: Any, root: str, names: Sequence[str]) -> None:
        """Sends files, but those that are removed meanwhile."""
        if not names:
            return
        try:
            ours = [str(self._folder / name) for name in names]
            store.put(ours, [f"{root}/{name}" for name in names])
        except FileNotFoundError:
            for name in names:
                try:
                    store.put_file(str(self._folder / name), f"{root}/{name}")
                except FileNotFoundError:
                    if (self._folder / name).exists():  # the store lacks something
                        raise

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
        return _is_ours(name, done, {name: version}) and (self._folder / name).is_file()


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


def _is_ours(name: str, done: Mapping[str, _Transfer], there: Mapping[str, str]) -> bool:
    """Whether the store's copy of a file is the one that this machine has sent or fetched last."""
    if name not in done or there[name] == done[name].version:
        return name in done
    before = done[name].version.removeprefix(SENDING)
    has_arrived = there[name].partition(" ")[0] == str(done[name].size)
    return before != done[name].version and (there[name] == before or has_arrived)


def _is_plain(name: str) -> bool:
    """Whether a name from the store is one that `send` gives, which stays in the run's folder."""
    parts = name.split("/")
    good = all(part and part[0] != "." and STAGING not in part for part in parts)
    return good and parts[-1] not in OWN and "\0" not in name


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
