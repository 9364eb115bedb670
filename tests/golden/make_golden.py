"""Makes golden records from peers' own functions: `make golden`.

    python tests/golden/make_golden.py [PEER...] [--seed N]

Each peer is pinned, and its functions run in an environment of its own below `.bench/`. Without
GitHub, put its repository at `.bench/sources/OWNER+NAME`.
peers/PEER.py writes their records, of the format of `golden_records.py`, to tests/golden/PEER.json.

With a seed (`make peers`), other random inputs are drawn, the records go to `.bench/peers/`, and
rlx computes them at once.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from golden_records import find_all_differences
from peers import QUIET, make_peer_environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class GoldenPeer:
    """Where a peer's functions come from.

    Attributes:
        repository: owner and name on GitHub; for a release, its name.
        commit: the commit whose functions are called, or the version of the release.
        pins: what they need, peers/PINS.txt.
        paths: the files that hold them; a release has them all.
        draws: whether its inputs depend on the seed.
    """

    repository: str
    commit: str
    pins: str
    paths: tuple[str, ...] = ()
    draws: bool = True


PEERS = {
    "rlcr": GoldenPeer(
        "damanimehul/RLCR",
        "8904bedf1af827e0a1bcc3c907bf505d88540bd2",
        "rlcr",
        ("reward_fns.py",),
        draws=False,
    ),
    "tinyzero": GoldenPeer(
        "Jiayi-Pan/TinyZero", "95df88f2dcb05f33bd18da546531b52d0954c18b", "verl", ("verl",)
    ),
    "kg_r1": GoldenPeer(
        "Jinyeop3110/KG-R1", "7538a53742ff5a4d389558759898d814c9ca13ae", "verl", ("verl",)
    ),
    "gdpo": GoldenPeer(
        "NVlabs/GDPO",
        "b080e63d0126870ad08acc8ebc3f04b728175a9e",
        "verl",
        ("trl-GDPO/trl-0.18.0-gdpo/trl/trainer",),
    ),
    "maxrl": GoldenPeer(
        "tajwarfahim/maxrl",
        "c0698ebb439a81ae1c6b01a842df3f2541816b4d",
        "verl",
        ("verl/trainer/ppo/core_algos.py",),
    ),
    "verl_0_9_1": GoldenPeer("verl", "0.9.1", "verl"),
    "trl_1_16_0": GoldenPeer("trl", "1.16.0", "verl"),
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PEERS)))
@click.option("--seed", type=int, help="Draw other inputs, and compare instead of storing them.")
def main(names: tuple[str, ...], seed: int | None) -> None:
    """Make the records of some peers, or of all."""
    differing = []
    for name in names or PEERS:
        if seed is not None and not PEERS[name].draws:
            continue
        peer = PEERS[name]
        python = make_peer_environment(ROOT / ".bench" / peer.pins, HERE / f"peers/{peer.pins}.txt")
        script = [python, HERE / "peers" / f"{name}.py", fetch_commit(peer)]
        file = (HERE if seed is None else ROOT / ".bench" / "peers") / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        more = [] if seed is None else [str(seed)]
        environment = {**os.environ, **QUIET}
        subprocess.run([*script, file, *more], check=True, stdout=sys.stderr, env=environment)
        click.echo(file.relative_to(ROOT))
        if seed is not None and (found := find_all_differences(json.loads(file.read_text()))):
            click.echo("\n".join(f"  {difference}" for difference in found))
            differing.append(name)
    if differing:
        raise SystemExit(f"differs: {', '.join(differing)}")


def fetch_commit(peer: GoldenPeer) -> Path:
    """A folder with the peer's files as of its commit or release."""
    if not peer.paths:
        return fetch_release(peer.repository, peer.commit)
    folder = ROOT / ".bench" / "sources" / peer.commit
    if not folder.exists():
        repository = folder.parent / peer.repository.replace("/", "+")
        if not repository.exists():
            place = f"https://github.com/{peer.repository}"
            clone = ["git", "clone", "--quiet", "--bare", "--filter=blob:none", place, repository]
            subprocess.run(clone, check=True)
        archive = ["git", "-C", repository, "archive", peer.commit, *peer.paths]
        held = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
        with tarfile.open(fileobj=BytesIO(held)) as files:
            files.extractall(folder, filter="data")
    return folder


def fetch_release(name: str, version: str) -> Path:
    """A folder with the files of a release's wheel, without what it depends on."""
    folder = ROOT / ".bench" / "sources" / f"{name}-{version}"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as aside:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", aside]
            subprocess.run([*pip, f"{name}=={version}"], check=True)
            (wheel,) = Path(aside).glob("*.whl")
            with zipfile.ZipFile(wheel) as files:
                files.extractall(folder)
    return folder


if __name__ == "__main__":
    main()
