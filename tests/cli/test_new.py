"""An empty folder and the wheel are enough to begin."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlx.cli import main

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from rlx.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The content of the wheel, as pip would install it."""
    made, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(made)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = made.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_an_example_comes_from_the_wheel(installed, tmp_path):
    def rlx(*arguments):
        return subprocess.run(
            [sys.executable, "-c", MAIN, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=False,
        )

    probe = [sys.executable, "-c", "import rlx; print(rlx.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = subprocess.run(probe, env=environment, capture_output=True, text=True, check=True)
    assert where.stdout.startswith(str(installed))
    listed = rlx("new")
    assert listed.returncode == 0 and "quick " in listed.stdout
    made = rlx("new", "--from", "quick")
    assert made.returncode == 0, made.stderr
    written = (tmp_path / "quick.yaml").read_text()
    assert written == (ROOT / "experiments" / "quick.yaml").read_text()
    assert "rlx submit quick.yaml" in made.stdout
    checked = rlx("validate", "quick.yaml")
    assert checked.returncode == 0, checked.stderr
    assert rlx("new", "--from", "my_data").returncode == 0
    for name in ("fetch.py", "train.jsonl", "test.jsonl"):
        beside = Path("experiments", "smollm2", name)
        assert (tmp_path / beside).read_bytes() == (ROOT / beside).read_bytes()


def test_what_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "--from", "rlcr", "mine.yaml"]) == 0
    before = (tmp_path / "mine.yaml").read_text()
    assert main(["new", "--from", "quick", "mine.yaml"]) == 2
    assert "mine.yaml exists already" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == before
    assert main(["new", "--from", "rlrc"]) == 2
    assert "did you mean 'rlcr'?" in capsys.readouterr().err
    assert main(["new", "mine.yaml"]) == 2
    assert "name the example to copy" in capsys.readouterr().err


def test_an_example_on_stdout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for example in sorted((ROOT / "experiments").glob("*.yaml")):
        assert main(["new", "--from", example.stem, "-"]) == 0
        assert capsys.readouterr().out == example.read_text()
    assert not list(tmp_path.iterdir())
