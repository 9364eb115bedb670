"""Digests of a checkpoint's files, computed by all ranks: each hashes what it has written.

A rank finds its own files in its machine's memory; those of others it would have to read again.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from rlx.sealing import CheckpointError, ComputeDigests, compute_digests, list_files
from rlx_registry import sync_to_disk

if TYPE_CHECKING:
    from rlx.learner import Ranks

__all__ = ["find_by_shared_hashing", "hash_written_files"]

Found = TypeVar("Found")
_Share = dict[Path, str] | CheckpointError | OSError

OF_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_")
"""How the names of DeepSpeed's files of one rank begin; rank 0 writes all others."""


def hash_written_files(folder: Path, ranks: "Ranks") -> dict[str, str]:
    """Syncs and hashes the files of a folder, each by the rank that wrote it; every rank calls it
    when all have written.

    Returns:
        SHA-256 in hex by path in the folder; the same on every rank.

    Raises:
        CheckpointError, OSError: a rank cannot read or sync its files; raised on every rank.
    """
    own = [folder / name for name in list_files(folder) if _is_own(name, ranks)]
    share = _try_digests(own, sync=True)
    if isinstance(share, dict):  # ranks on several disks have different paths of the folder
        share = {path.relative_to(folder): digest for path, digest in share.items()}
    return {str(name): digest for name, digest in _merge(ranks.gather(share)).items()}


def find_by_shared_hashing(find: Callable[[ComputeDigests], Found], ranks: "Ranks") -> Found:
    """Returns on every rank what `find` returns on rank 0; the others hash their
    share of the files whose digests it asks for.

    Raises:
        CheckpointError: `find` raised it; raised on every rank.
    """
    found: Found | CheckpointError | None = None

    def compute_share(wanted: Iterable[Path]) -> list[_Share]:
        return ranks.gather(_try_digests(p for p in wanted if _is_own(p.name, ranks)))

    if not ranks.is_first:
        while (wanted := ranks.gather(None)[0]) is not None:
            compute_share(wanted)

    def compute_together(files: Iterable[Path]) -> list[str]:
        wanted = list(files)
        ranks.gather(wanted)
        digests = _merge(compute_share(wanted))
        return [digests[path] for path in wanted]

    if ranks.is_first:
        try:
            found = find(compute_together)
        except CheckpointError as error:
            found = error
        ranks.gather(None)
    outcome = ranks.gather(found)[0]
    if isinstance(outcome, CheckpointError):
        raise outcome
    return cast("Found", outcome)


def _is_own(name: str, ranks: "Ranks") -> bool:
    """Whether this rank hashes a file: the one that wrote it; each file is one rank's own, also
    after their number has changed."""
    named = OF_RANK.match(Path(name).name)
    return (int(named[1]) % ranks.count if named else 0) == ranks.rank


def _try_digests(files: Iterable[Path], *, sync: bool = False) -> _Share:
    """Digests by file, or why one cannot be synced or read, for the other ranks."""
    paths = list(files)
    try:
        for path in paths if sync else ():
            sync_to_disk(path)
        return dict(zip(paths, compute_digests(paths), strict=True))
    except (CheckpointError, OSError) as error:
        return error


def _merge(shares: Sequence[_Share]) -> dict[Path, str]:
    merged: dict[Path, str] = {}
    for share in shares:
        if isinstance(share, CheckpointError | OSError):
            raise share
        merged |= share
    return merged
