"""`rlx submit --seeds --grid`: a group is checked and shown as a whole."""

from pathlib import Path

import pytest

from rlx.cli import main
from rlx.cli.many import grid_of, seeds_of
from rlx.errors import SpecError
from rlx_registry import Registry

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"
GRID = ("--grid", "estimator.confidence.normalize=center,std")


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0..4", [0, 1, 2, 3, 4]), ("3", [3]), ("7, 1..2", [7, 1, 2]), ("1,1..3", [1, 2, 3])],
)
def test_seeds(text, seeds):
    assert seeds_of(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "4..0", "1-3", "-1", "0..", "1,,2"])
def test_what_are_no_seeds(text):
    with pytest.raises(SpecError, match="--seeds"):
        seeds_of(text)


def test_a_grid_is_every_combination_of_values_as_yaml_reads_them():
    cells = grid_of(["a.b=1,0.5", "c=[1, 2],x,{k: null}"])
    assert len(cells) == 6
    assert cells[0] == {"a.b": 1, "c": [1, 2]}
    assert cells[-1] == {"a.b": 0.5, "c": {"k": None}}
    assert grid_of([]) == [{}]


@pytest.mark.parametrize("texts", [["a"], ["a="], ["=1"], ["a=1", "a=2"], ["a={"]])
def test_what_is_no_grid(texts):
    with pytest.raises(SpecError, match="path=a,b"):
        grid_of(texts)


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/home/registry.db"


def test_a_group_is_recorded_once(url, capsys):
    command = ["submit", str(RLCR), "--seeds", "0..2", *GRID, "--queue"]
    assert main(command) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["RUN", "estimator.confidence.normalize", "seed", "STEP", "STATUS"]
    assert len(rows) == 6
    assert rows[0].split() == ["r-0001", '"center"', "0", "0", "queued"]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[1:] == rows, "they are there already"
    with Registry.open(url) as registry:
        assert len(registry.runs()) == 6
        assert len({run.digest for run in registry.runs()}) == 2
        registry.transition("r-0002", ["queued"], "stopped")
    assert main(command) == 0
    ids = [row.split()[0] for row in capsys.readouterr().out.splitlines()[1:]]
    assert ids == ["r-0001", "r-0007", "r-0003", "r-0004", "r-0005", "r-0006"]


def test_nothing_is_recorded_where_one_member_cannot_be(url, capsys):
    grid = ("--grid", "estimator.confidence.normalize=center,stdd")
    assert main(["submit", str(RLCR), "--seeds", "0..1", *grid, "--queue"]) == 2
    assert "stdd" in capsys.readouterr().err
    with pytest.raises(Exception, match="no registry"):
        Registry.open(url, create=False)


@pytest.mark.parametrize("option", ["--again", "--detach", "--quiet"])
def test_options_of_single_runs(url, option, capsys):
    assert main(["submit", str(RLCR), "--seeds", "0..1", option]) == 2
    assert "a group has --queue" in capsys.readouterr().err
