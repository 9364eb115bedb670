"""What `rlx plugins new` begins is installed, tested, linted and typed by other programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.cli import main

ROOT = Path(__file__).parents[2]
BEGUN = {
    "rlx-length-penalty": "reward",
    "rlx-sums": "task",
    "rlx-words": "environment",
    "rlx-gap": "estimator",
    "rlx-later": "mask",
    "rlx-drafts": "schedule",
    "rlx-below": "launcher",
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A plugin of each kind, just begun."""
    into = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(into)
        for folder, kind in BEGUN.items():
            name = folder.removeprefix("rlx-").replace("-", "_")
            assert main(["plugins", "new", name, "--kind", kind]) == 0
    return into


def run(*command, cwd=None, **environment):
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


CHECK_ALL = """
import sys
from rlx.cli import main
sys.exit(max(main(["plugins", "check", name]) for name in sys.argv[1:]))
"""


def test_what_is_begun_installs_without_a_network_and_keeps_every_promise(begun, tmp_path):
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", tmp_path)
    folders = [begun / name for name in BEGUN]
    done = run(sys.executable, "-m", "pip", "install", *options, *folders)
    assert done.returncode == 0, done.stderr
    names = [name.removeprefix("rlx-").replace("-", "_") for name in BEGUN]
    done = run(sys.executable, "-c", CHECK_ALL, *names, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("promises hold") == len(BEGUN)
    for folder, kind in BEGUN.items():
        assert f"({kind}, {folder} 0.1.0)" in done.stdout


@pytest.mark.parametrize("folder", BEGUN)
def test_what_is_begun_passes_its_own_test(begun, folder):
    done = run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        cwd=begun / folder,
        PYTHONPATH=str(begun / folder),
    )
    assert done.returncode == 0, done.stdout


def test_what_is_begun_is_well_formed(begun):
    ruff = (sys.executable, "-m", "ruff")
    for command in ((*ruff, "check", "."), (*ruff, "format", "--check", ".")):
        done = run(*command, "--no-cache", cwd=begun)
        assert done.returncode == 0, done.stdout


def test_what_is_begun_is_typed_strictly(begun):
    """With the repository's own settings, which are strict, and so with its cache."""
    folders = [begun / name for name in BEGUN]
    files = [*begun.glob("*/*/*.py")]
    assert len(files) == 2 * len(BEGUN) + 3, "and the implementations of estimator, mask, launcher"
    done = run(
        *(sys.executable, "-m", "mypy", "--strict", *files),
        cwd=ROOT,
        MYPYPATH=os.pathsep.join(map(str, folders)),
    )
    assert done.returncode == 0, done.stdout
