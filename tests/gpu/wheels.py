"""Wheels that a machine with a GPU and no network lacks: lists them, and fetches them elsewhere.

On the GPU machine:            python -m pip list --format=freeze > present.txt
On a machine with a network:   python tests/gpu/wheels.py present.txt --into wheels
On the GPU machine again:      make gpu-check WHEELS=wheels

The needs of rlx are followed through the metadata of the environment that runs this (`make
install`), with that environment's versions; what is already present is left out. MLflow's small
distribution stands in for the whole, whose interface nobody looks at there.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
INSTEAD = {"mlflow": "mlflow-skinny"}
SOURCES_ONLY = {"deepspeed": {"DS_BUILD_OPS": "0"}}
"""Distributions without wheels, and the environment to build theirs in."""
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 27, 28, 31, 34)] + ["manylinux2014_x86_64"]


def needs(name: str, extras: frozenset[str], python: str) -> Iterator[Requirement]:
    """What a distribution needs on the GPU machine."""
    target = {"python_version": python, "python_full_version": f"{python}.0"}
    for text in distribution(name).requires or ():
        need = Requirement(text)
        extra = [{**target, "extra": e} for e in (*extras, "")]
        if need.marker is None or any(need.marker.evaluate(e) for e in extra):
            yield need


def missing(present: set[str], python: str) -> dict[str, str]:
    """Name and version of every distribution to bring along, rlx's own not included."""
    found: dict[str, str] = {}
    waiting = [*needs("rlx", frozenset({"lora", "math"}), python)]
    waiting += [Requirement(name) for name in ("pytest", "pytest-timeout", "hypothesis")]
    while waiting:
        need = waiting.pop()
        name = INSTEAD.get(canonicalize_name(need.name), canonicalize_name(need.name))
        if name in present or name in found:
            continue
        found[name] = version(name)
        waiting += needs(name, frozenset(need.extras), python)
    return dict(sorted(found.items()))


def fetch(wanted: dict[str, str], into: Path, python: str) -> None:
    """Downloads wheels, and builds the few that nobody offers, rlx's own among them."""
    pip = [sys.executable, "-m", "pip"]
    plain = [f"{n}=={v}" for n, v in wanted.items() if n not in SOURCES_ONLY]
    platforms = [word for p in PLATFORMS for word in ("--platform", p)]
    where = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    subprocess.run([*pip, "download", "--no-deps", *where, "-d", str(into), *plain], check=True)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(into)]
    for name, environment in SOURCES_ONLY.items():
        if name in wanted:
            what = f"{name}=={wanted[name]}"
            subprocess.run([*build, what], check=True, env={**os.environ, **environment})
    subprocess.run([*build, str(ROOT)], check=True)


def main() -> None:
    """Prints the list; fetches with `--into`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("present", type=Path, help="`pip list --format=freeze` of that machine")
    here = ".".join(map(str, sys.version_info[:2]))
    parser.add_argument("--python", default=here, help=f"version of that machine's, here {here}")
    parser.add_argument("--into", type=Path, help="fetch the wheels into this folder")
    options = parser.parse_args()
    lines = options.present.read_text().splitlines()
    present = {canonicalize_name(line.split("==")[0]) for line in lines if line.strip()}
    wanted = missing(present, options.python)
    for name, number in wanted.items():
        print(f"{name}=={number}")
    if options.into:
        fetch(wanted, options.into, options.python)
        files = list(options.into.glob("*.whl"))
        size = sum(f.stat().st_size for f in files) / 1e6
        print(f"{len(files)} wheels, {size:.0f} MB, in {options.into}", file=sys.stderr)


if __name__ == "__main__":
    main()
