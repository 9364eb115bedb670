"""Makes golden records from peers' own functions: `make golden`.

    python tests/golden/make_golden.py [PEER...] [--checkouts FOLDER]

Each peer is pinned to a commit, and its functions run in an environment of its own below `.bench/`.
peers/PEER.py calls them and writes records of the format that `rlx.testing.golden` reads to
tests/golden/PEER.json. Without `--checkouts`, the commits are fetched from GitHub.
"""

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from peers import QUIET, make_peer_environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class GoldenPeer:
    """Where a peer's functions come from.

    Attributes:
        repository: owner and name on GitHub.
        commit: the commit whose functions are called.
        pins: what they need, peers/PINS.txt.
        paths: the files that hold them.
    """

    repository: str
    commit: str
    pins: str
    paths: tuple[str, ...]


PEERS = {
    "rlcr": GoldenPeer(
        "damanimehul/RLCR", "8904bedf1af827e0a1bcc3c907bf505d88540bd2", "rlcr", ("reward_fns.py",)
    ),
    "tinyzero": GoldenPeer(
        "Jiayi-Pan/TinyZero", "95df88f2dcb05f33bd18da546531b52d0954c18b", "verl", ("verl",)
    ),
    "kg_r1": GoldenPeer(
        "Jinyeop3110/KG-R1", "7538a53742ff5a4d389558759898d814c9ca13ae", "verl", ("verl",)
    ),
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PEERS)))
@click.option(
    "--checkouts",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder of repositories, OWNER+NAME each, instead of GitHub.",
)
def main(names: tuple[str, ...], checkouts: Path | None) -> None:
    """Make the records of some peers, or of all."""
    for name in names or PEERS:
        peer = PEERS[name]
        python = make_peer_environment(ROOT / ".bench" / peer.pins, HERE / f"peers/{peer.pins}.txt")
        script = [python, HERE / "peers" / f"{name}.py", fetch_commit(peer, checkouts)]
        file = HERE / f"{name}.json"
        subprocess.run([*script, file], check=True, stdout=sys.stderr, env={**os.environ, **QUIET})
        click.echo(f"tests/golden/{name}.json")


def fetch_commit(peer: GoldenPeer, checkouts: Path | None) -> Path:
    """A folder with the peer's files as of its commit."""
    folder = ROOT / ".bench" / "sources" / peer.commit
    if not folder.exists():
        inside = (checkouts or folder.parent) / peer.repository.replace("/", "+")
        repository = inside / "repo" if (inside / "repo").exists() else inside
        if checkouts is None and not repository.exists():
            place = f"https://github.com/{peer.repository}"
            clone = ["git", "clone", "--quiet", "--bare", "--filter=blob:none", place, repository]
            subprocess.run(clone, check=True)
        archive = ["git", "-C", repository, "archive", peer.commit, *peer.paths]
        held = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
        with tarfile.open(fileobj=BytesIO(held)) as files:
            files.extractall(folder, filter="data")
    return folder


if __name__ == "__main__":
    main()
