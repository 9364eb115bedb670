"""Makes golden records from peers' own functions: `make golden`.

    python tests/golden/make_golden.py [PEER...] [--checkouts FOLDER]

Each peer is pinned to a commit, and its functions run in an environment of its own below `.bench/`.
peers/PEER.py calls them and prints records of the format that `rlx.testing.golden` reads; they are
written to tests/golden/PEER.json. Without `--checkouts`, the commits are fetched from GitHub.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
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
    """

    repository: str
    commit: str
    pins: str


PEERS = {
    "rlcr": GoldenPeer("damanimehul/RLCR", "8904bedf1af827e0a1bcc3c907bf505d88540bd2", "rlcr"),
    "tinyzero": GoldenPeer(
        "Jiayi-Pan/TinyZero", "95df88f2dcb05f33bd18da546531b52d0954c18b", "verl"
    ),
    "kg_r1": GoldenPeer("Jinyeop3110/KG-R1", "7538a53742ff5a4d389558759898d814c9ca13ae", "verl"),
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
        done = subprocess.run(
            script, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **QUIET}
        )
        (HERE / f"{name}.json").write_text(done.stdout, encoding="utf-8")
        click.echo(f"tests/golden/{name}.json")


def fetch_commit(peer: GoldenPeer, checkouts: Path | None) -> Path:
    """A folder with the files of the peer's commit."""
    folder = ROOT / ".bench" / "sources" / peer.commit
    if not folder.exists():
        place = f"https://github.com/{peer.repository}"
        if checkouts is not None:
            inside = checkouts / peer.repository.replace("/", "+")
            place = str(inside / "repo" if (inside / "repo").exists() else inside)
        aside = folder.with_suffix(".tmp")
        for command in (
            ["git", "init", "--quiet", aside],
            ["git", "-C", aside, "fetch", "--quiet", "--depth", "1", place, peer.commit],
            ["git", "-C", aside, "checkout", "--quiet", "FETCH_HEAD"],
        ):
            subprocess.run(command, check=True)
        aside.replace(folder)
    return folder


if __name__ == "__main__":
    main()
