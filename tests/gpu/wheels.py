"""Fetches the wheels that a machine with a GPU and no network lacks.

On the GPU machine:            python -m pip list --format=freeze > present.txt
On a machine with a network:   python tests/gpu/wheels.py present.txt 3.12 wheels
On the GPU machine again:      make gpu-check WHEELS=wheels

3.12 is the version of the GPU machine's Python. The needs of rlx are followed through the metadata
of the environment that runs this (`make install`), with that environment's versions; what is
already present is left out. MLflow's small distribution stands in for the whole, whose interface
nobody looks at there.
"""

import os
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
INSTEAD = {"mlflow": "mlflow-skinny"}
SOURCES_ONLY = {"deepspeed": {"DS_BUILD_OPS": "0"}}
"""Distributions without wheels, and the environment to build theirs in."""
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 27, 28, 31, 34)] + ["manylinux2014_x86_64"]


def find_needs(name: str, extras: set[str], python: str) -> list[Requirement]:
    """What a distribution needs on the GPU machine."""
    target = {"python_version": python, "python_full_version": f"{python}.0"}
    needs = [Requirement(text) for text in distribution(name).requires or ()]
    return [
        need
        for need in needs
        if need.marker is None
        or any(need.marker.evaluate({**target, "extra": extra}) for extra in {*extras, ""})
    ]


def find_missing(present: set[str], python: str) -> dict[str, str]:
    """Name and version of every distribution to bring along, rlx's own not included."""
    found: dict[str, str] = {}
    waiting = find_needs("rlx", {"lora", "math"}, python)
    waiting += [Requirement(name) for name in ("pytest", "pytest-timeout", "hypothesis")]
    while waiting:
        need = waiting.pop()
        name = INSTEAD.get(canonicalize_name(need.name), canonicalize_name(need.name))
        if name not in present and name not in found:
            found[name] = version(name)
            waiting += find_needs(name, need.extras, python)
    return found


def main(freeze: str, python: str, into: str) -> None:
    """Downloads wheels, and builds the few that nobody offers, rlx's own among them."""
    present = {canonicalize_name(line.split("==")[0]) for line in Path(freeze).read_text().split()}
    wanted = {name: f"{name}=={v}" for name, v in find_missing(present, python).items()}
    print(*sorted(wanted.values()), sep="\n")
    pip = [sys.executable, "-m", "pip"]
    where = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    where += [word for platform in PLATFORMS for word in ("--platform", platform)]
    plain = [pin for name, pin in wanted.items() if name not in SOURCES_ONLY]
    subprocess.run([*pip, "download", "--no-deps", *where, "-d", into, *plain], check=True)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", into]
    for name, environment in SOURCES_ONLY.items():
        if name in wanted:
            subprocess.run([*build, wanted[name]], check=True, env=os.environ | environment)
    subprocess.run([*build, str(ROOT)], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
