"""Peers: what rlx is compared with, installed apart and asked through pipes.

What a peer needs is pinned in peers/NAME.txt; its environment is made in .bench/NAME at the root
when a figure first asks for it, and again when the pins change.
"""

import json
import os
import subprocess
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness import Spent

ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).with_name("peers")
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""What peers ask for and no text needs; beside a CPU build of torch their wheels do not load."""
RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""A peer is no rank of ours."""
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def peer_python(name: str) -> Path:
    """The Python of a peer's environment, which is made where it is missing or out of date."""
    return make_peer_environment(ROOT / ".bench" / name, PEERS / f"{name}.txt")


def make_peer_environment(folder: Path, pins: Path) -> Path:
    """The Python of the environment in `folder`, made anew where its pins have changed."""
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != pins.read_text():
        print(f"    installing {pins.stem} into {folder.relative_to(ROOT)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", pins], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "-y", *UNUSED], check=True)
        stamp.write_text(pins.read_text())
    return python


class Peer:
    """A process that works when it is sent a line, and answers every line with one of JSON."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process = process
        self._errors = errors

    @classmethod
    @contextmanager
    def started(cls, command: Sequence[object], errors: Path) -> Iterator["Peer"]:
        """Starts it; it ends with the block. In the file `errors` is what it complains of."""
        inherited = {name: value for name, value in os.environ.items() if name not in RANKS}
        with errors.open("w") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                env={**inherited, **QUIET},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            yield cls(process, errors)
        finally:
            process.communicate()

    def answer(self) -> dict:
        """The next line of JSON that it writes; others are not for us."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"a peer ended early: {self._errors.read_text()[-2000:]}")

    def spent(self) -> Spent:
        """What one more piece of work costs it."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return Spent(**self.answer())
