"""`rlx new`: shipped experiments, copied to where one works."""

from pathlib import Path

import pytest

from rlx.cli import main

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("folder")


def test_an_example_comes_with_what_it_reads(capsys):
    assert main(["new"]) == 0
    assert "quick " in capsys.readouterr().out
    assert main(["new", "--from", "my_data"]) == 0
    assert "rlx submit my_data.yaml" in capsys.readouterr().out
    for name in ("fetch.py", "train.jsonl", "test.jsonl"):
        beside = Path("experiments", "smollm2", name)
        assert beside.read_bytes() == (ROOT / beside).read_bytes()


def test_what_cannot_be_written(capsys):
    assert main(["new", "--from", "rlcr", "mine.yaml"]) == 0
    before = Path("mine.yaml").read_text()
    assert main(["new", "--from", "quick", "mine.yaml"]) == 2
    assert "mine.yaml exists already" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == before
    assert main(["new", "--from", "rlrc"]) == 2
    assert "did you mean 'rlcr'?" in capsys.readouterr().err
    assert main(["new", "mine.yaml"]) == 2
    assert "name the example to copy" in capsys.readouterr().err


def test_an_example_on_stdout(folder, capsys):
    for example in sorted((ROOT / "experiments").glob("*.yaml")):
        assert main(["new", "--from", example.stem, "-"]) == 0
        assert capsys.readouterr().out == example.read_text()
    assert not list(folder.iterdir())
