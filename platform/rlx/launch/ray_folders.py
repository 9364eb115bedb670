"""The folder of a run on nodes of a Ray cluster that do not see its disk.

Ranks there have one among the temporary files of their node's first actor. The driver sends what a
rank reads when it starts. Warm starts and checkpoints travel between ranks (`rlx.learner.Ranks`),
and rank 0, which must see the run's folder, keeps them. When the ranks end, theirs is removed.
"""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlx.home import DISK, RunFolder

__all__ = [
    "build_home_environment",
    "choose_working_folder",
    "find_folder",
    "leave_mark",
    "read_start_files",
    "write_start_files",
]


@contextmanager
def leave_mark(folder: RunFolder) -> Iterator[str]:
    """Leaves a file in a run's folder, by which nodes know that they see it; yields its name."""
    mark = folder.root / f".seen-{secrets.token_hex(8)}"
    mark.touch()
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)


def find_folder(folder: str, mark: str, temporary: str) -> str:
    """Where ranks of this node have the run's folder: where it is, if they see its mark there,
    otherwise among these temporary files."""
    if os.path.exists(f"{folder}/{mark}"):  # noqa: PTH110  (False if it may not be looked at)
        return folder
    return str(Path(temporary, "home", "runs", Path(folder).name))


def build_home_environment(folder: str, node: str) -> dict[str, str]:
    """Environment variables for a rank whose folder of the run is its node's own."""
    return {"RLX_HOME": str(Path(folder).parents[1]), DISK: node}


def read_start_files(folder: RunFolder) -> dict[str, bytes]:
    """What every rank reads before ranks have met, by path in the run's folder."""
    paths = [folder.resolved_spec, *folder.tokenizer.rglob("*")]
    return {str(p.relative_to(folder.root)): p.read_bytes() for p in paths if p.is_file()}


def write_start_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes them; actors of one node may do so at the same time."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.write_bytes(content)
        aside.replace(path)


def choose_working_folder(folder: str, temporary: str) -> str:
    """The folder to work in: this one, or where this node does not have it, a temporary one."""
    return folder if os.path.isdir(folder) else temporary  # noqa: PTH112  (False if hidden)
