"""`rlx submit --seeds --grid`: a group is checked and shown as a whole."""

import json
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.cli.follow import GroupView
from rlx.cli.groups import parse_grid, read_run_group, record_group
from rlx_registry import Registry

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"
GRID = ("--grid", "estimator.confidence.normalize=center,std")


def test_a_grid_is_every_combination_of_values_as_yaml_reads_them():
    cells = parse_grid(["a.b=1,0.5", "c=[1, 2],x,{k: null}"])
    assert len(cells) == 6
    assert cells[0] == {"a.b": 1, "c": [1, 2]}
    assert cells[-1] == {"a.b": 0.5, "c": {"k": None}}
    assert parse_grid([]) == [{}]
    assert parse_grid(["a=2e-4,on,x,1,x,true,1"]) == [{"a": v} for v in (2e-4, "on", "x", 1, True)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seeds", "0..999999999"],
        ["--seeds", "0..9999,0..999999999"],
        ["--seeds", "0..5000", *GRID],
        [word for n in range(5) for word in ("--grid", f"a.{n}={','.join('0123456789')}")],
    ],
)
def test_a_group_has_an_end(url, arguments, capsys):
    assert main(["submit", str(RLCR), *arguments, "--queue"]) == 2
    assert "a group has at most 10000" in capsys.readouterr().err


def test_a_group_is_recorded_once(url, capsys):
    command = ["submit", str(RLCR), "--seeds", "0..1", *GRID, "--queue"]
    assert main(command) == 0
    name, head, *rows = capsys.readouterr().out.splitlines()
    assert name == "group rlcr-normalize"
    assert head.split() == ["RUN", "NAME", "normalize", "SEED", "STATUS", "STEP", "AGE"]
    assert len(rows) == 4
    assert rows[0].split()[:-2] == ["r-0001", "rlcr", '"center"', "0", "queued", "0/130"]
    assert main(command) == 0
    again = [row.split()[0] for row in capsys.readouterr().out.splitlines()[2:]]
    assert again == [row.split()[0] for row in rows], "they are there already"
    with Registry.open(url) as registry:
        assert len(registry.runs()) == 4
        assert len({run.digest for run in registry.runs()}) == 2
        registry.transition("r-0002", ["queued"], "stopped")
    assert main(command) == 0
    ids = [row.split()[0] for row in capsys.readouterr().out.splitlines()[2:]]
    assert ids == ["r-0001", "r-0005", "r-0003", "r-0004"]


def groups(url):
    with Registry.open(url) as registry:
        return registry.groups()


def queued(*arguments):
    assert main(["submit", str(RLCR), *arguments, "--queue"]) == 0


def test_a_group_is_known_by_its_name(url, capsys):
    queued("--seeds", "0..1")
    assert groups(url) == {"rlcr-seeds": ["r-0001", "r-0002"]}
    queued("--seeds", "0..2")
    assert groups(url) == {"rlcr-seeds": ["r-0001", "r-0002", "r-0003"]}, "it has grown"
    queued("--seeds", "1", "--group", "mine")
    queued("--seeds", "0..1", "--set", "phases.0.steps=3")
    queued("--seeds", "0..1", "--set", "phases.0.steps=3")
    expected = {
        "rlcr-seeds": ["r-0001", "r-0002", "r-0003"],
        "mine": ["r-0002"],
        "rlcr-seeds-2": ["r-0004", "r-0005"],
    }
    assert groups(url) == expected, "other recipes are another group"
    capsys.readouterr()
    assert main(["runs", "--group", "rlcr-seeds", "--json"]) == 0
    told = {run["run"]: run["groups"] for run in json.loads(capsys.readouterr().out)}
    assert told == {
        "r-0003": ["rlcr-seeds"],
        "r-0002": ["rlcr-seeds", "mine"],
        "r-0001": ["rlcr-seeds"],
    }
    assert main(["runs", "--group", "rlcr-sedes"]) == 2
    assert "no group 'rlcr-sedes'; did you mean 'rlcr-seeds'?" in capsys.readouterr().err


def test_what_is_no_group(url, capsys, subtests):
    for arguments, says in (
        (["--seeds", "0", "--group", "r-0007"], "a run could have this name"),
        (["--seeds", "0", "--group", "latest"], "a run could have this name"),
        (["--seeds", "0", "--group", "a b"], "write letters, digits"),
        (["--group", "mine"], "add one of them"),
        (["--seeds", "0..1", "--grid", "seed=1,2"], "both set the seed"),
        (["--grid", "name=a,b"], "a name does not change the experiment"),
        (["--seeds", "4..0"], "write 0..4"),
        (["--grid", "a="], "write path=a,b"),
        (["--seeds", "0..1", "--again"], "a group has --queue"),
    ):
        with subtests.test(arguments=arguments, says=says):
            assert main(["submit", str(RLCR), *arguments, "--queue"]) == 2
            assert says in capsys.readouterr().err


def test_a_group_is_not_called_as_an_experiment(url, capsys):
    assert main(["submit", str(RLCR), "--set", "name=rlcr-seeds", "--queue"]) == 0
    for name in ("rlcr", "rlcr-seeds"):
        assert main(["submit", str(RLCR), "--seeds", "0", "--group", name, "--queue"]) == 2
        assert f"--group {name}: an experiment has this name" in capsys.readouterr().err
    queued("--seeds", "0..1")
    assert list(groups(url)) == ["rlcr-seeds-2"]


def test_a_group_is_followed_by_a_line_per_change(url, capsys):
    members = read_run_group(RLCR, (), "0..1", ("estimator.confidence.normalize=center",))
    with Registry.open(url) as registry:
        name, runs = record_group(registry, members, None)
        cells = {run.id: member.cell for run, member in zip(runs, members, strict=True)}
        view = GroupView(registry, name, cells)
        view.print_changes()
        view.print_changes()
        registry.transition("r-0001", ["queued"], "stopped")
        view.print_changes()
        registry.delete_run("r-0001")  # by somebody else
        view.print_changes()
        view.print_table()
    shown = capsys.readouterr()
    lines = [line.split("  ", 1)[1] for line in shown.err.splitlines()]
    varied = 'estimator.confidence.normalize="center"'
    assert lines == [
        f"r-0001  {varied} seed=0  queued",
        f"r-0002  {varied} seed=1  queued",
        f"r-0001  {varied} seed=0  stopped",
    ]
    _, left = shown.out.splitlines()
    assert left.startswith("r-0002")


def test_two_equal_groups_that_are_recorded_at_once_have_the_same_runs(url, monkeypatch):
    members = read_run_group(RLCR, (), "0..2", ())
    with Registry.open(url) as registry:
        _, first = record_group(registry, members, None)
        with monkeypatch.context() as patch:  # the second has looked before the first recorded
            patch.setattr(Registry, "runs", lambda *_, **__: [])
            _, second = record_group(registry, members, None)
        assert [run.id for run in second] == [run.id for run in first]
        assert len(registry.runs()) == 3
