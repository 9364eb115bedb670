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
from io import BytesIO
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peer_environment import QUIET, make_peer_environment
from golden_records import find_all_differences

HERE = Path(__file__).parent
BENCH = HERE.parents[1] / ".bench"
PEERS = {
    "rlcr": ("damanimehul/RLCR", "8904bedf1af827e0a1bcc3c907bf505d88540bd2", "reward_fns.py"),
    "tinyzero": ("Jiayi-Pan/TinyZero", "95df88f2dcb05f33bd18da546531b52d0954c18b", "verl"),
    "kg_r1": ("Jinyeop3110/KG-R1", "7538a53742ff5a4d389558759898d814c9ca13ae", "verl"),
    "gdpo": (
        "NVlabs/GDPO",
        "b080e63d0126870ad08acc8ebc3f04b728175a9e",
        "trl-GDPO/trl-0.18.0-gdpo/trl/trainer",
    ),
    "maxrl": (
        "tajwarfahim/maxrl",
        "c0698ebb439a81ae1c6b01a842df3f2541816b4d",
        "verl/trainer/ppo/core_algos.py",
    ),
    "verl_0_9_1": ("verl", "0.9.1", None),
    "trl_1_16_0": ("trl", "1.16.0", None),
}
"""Repository on GitHub, commit, and what holds the functions; or a release and its version."""


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PEERS)))
@click.option("--seed", type=int, help="Draw other inputs, and compare instead of storing them.")
def main(names: tuple[str, ...], seed: int | None) -> None:
    """Make the records of some peers, or of all."""
    differing = []
    for name in names or PEERS:
        if seed is not None and name == "rlcr":
            continue  # it draws nothing
        pins = "rlcr" if name == "rlcr" else "verl"
        python = make_peer_environment(HERE / "peers" / f"{pins}.txt")
        file = (HERE if seed is None else BENCH / "peers") / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        script = [python, HERE / "peers" / f"{name}.py", fetch_sources(*PEERS[name]), file]
        script += [] if seed is None else [str(seed)]
        subprocess.run(script, check=True, stdout=sys.stderr, env={**os.environ, **QUIET})
        click.echo(file)
        if seed is not None and (found := find_all_differences(json.loads(file.read_text()))):
            click.echo("\n".join(f"  {difference}" for difference in found))
            differing.append(name)
    if differing:
        raise SystemExit(f"differs: {', '.join(differing)}")


def fetch_sources(name: str, version: str, path: str | None) -> Path:
    """A folder with a peer's files as of its commit or release."""
    folder = BENCH / "sources" / (version if path else f"{name}-{version}")
    if folder.exists():
        return folder
    if path is None:
        with tempfile.TemporaryDirectory() as aside:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", aside]
            subprocess.run([*pip, f"{name}=={version}"], check=True)
            (wheel,) = Path(aside).glob("*.whl")
            with zipfile.ZipFile(wheel) as files:
                files.extractall(folder)
        return folder
    repository = folder.parent / name.replace("/", "+")
    if not repository.exists():
        place = f"https://github.com/{name}"
        clone = ["git", "clone", "--quiet", "--bare", "--filter=blob:none", place, repository]
        subprocess.run(clone, check=True)
    archive = ["git", "-C", repository, "archive", version, path]
    held = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=BytesIO(held)) as files:
        files.extractall(folder, filter="data")
    return folder


if __name__ == "__main__":
    main()
