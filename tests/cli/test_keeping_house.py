"""`rlx rm` and the filters of `rlx runs`, on a home of real runs."""

import json
import os

import pytest
from stored_home import unpack_home
from submissions import submit

from rlx.cli import main
from rlx_registry import NotFoundError, Registry


@pytest.fixture
def home(tmp_path, monkeypatch):
    """r-0001 and r-0003 have finished, r-0002 was lost, and r-0004 waits in the queue."""
    path = unpack_home(tmp_path)
    monkeypatch.setenv("RLX_HOME", str(path))
    monkeypatch.chdir(tmp_path)
    with Registry.open(f"sqlite:///{path}/registry.db") as registry:
        run = registry.run("r-0001")
        submit(registry, seed=7, name="waiting", spec=run.spec, queue=True)
    return path


def told(capsys, *arguments, code=0):
    capsys.readouterr()
    assert main([*map(str, arguments)]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def listed(capsys, *arguments):
    return [run["run"] for run in json.loads(told(capsys, "runs", "--json", *arguments))]


def test_a_dry_run_says_what_would_go(home, capsys):
    out = told(capsys, "rm", "r-0001", "--dry-run")
    assert f"{os.path.relpath(home)}/runs/r-0001" in out
    assert "would remove" in out and "of 1 run" in out
    assert (home / "runs" / "r-0001" / "spec.json").exists()
    assert "r-0001" in listed(capsys)


def test_a_run_is_removed_with_its_records(home, capsys):
    told(capsys, "rm", "r-0001", "r-0002", "--yes")
    assert listed(capsys) == ["r-0004", "r-0003"]
    assert not (home / "runs" / "r-0001").exists()
    assert (home / "runs" / "r-0003" / "spec.json").exists()
    assert "no run 'r-0001'" in told(capsys, "status", "r-0001", code=2)
    with Registry.open(f"sqlite:///{home}/registry.db") as registry:
        with pytest.raises(NotFoundError):
            registry.results.metrics("r-0001")
        assert registry.results.metrics("r-0003")
        assert registry.results.rollout_steps("r-0003")


def test_parts_are_removed_alone(home, capsys):
    folder = home / "runs" / "r-0003"
    (folder / "checkpoints" / "step_000016").mkdir(parents=True)  # none is stored with the home
    out = told(capsys, "rm", "r-0003", "--rollouts", "--checkpoints", "--yes")
    assert str(os.path.relpath(folder / "rollouts")) in out
    assert not (folder / "rollouts").exists() and not (folder / "checkpoints").exists()
    assert (folder / "model" / "model.safetensors").exists()
    with Registry.open(f"sqlite:///{home}/registry.db") as registry:
        assert registry.results.rollout_steps("r-0003") == []
        assert registry.results.metrics("r-0003")
    assert "nothing to remove" in told(capsys, "rm", "r-0003", "--rollouts", "--yes")


def test_nothing_goes_unasked_or_alive(home, capsys):
    assert "r-0004 is queued: stop it first" in told(capsys, "rm", "r-0004", "--yes", code=2)
    assert "add --yes" in told(capsys, "rm", "r-0001", code=2)
    assert "name the runs, or select them" in told(capsys, "rm", "--yes", code=2)
    assert len(listed(capsys)) == 4


def test_a_group_is_removed_by_its_option(home, capsys):
    with Registry.open(f"sqlite:///{home}/registry.db") as registry:
        registry.join("r-0001", "study-of-lambda")
        registry.join("r-0003", "study-of-lambda")
    said = told(capsys, "rm", "study-of-lambda", "--yes", code=2)
    assert "`rlx rm --group study-of-lambda` removes its runs" in said
    told(capsys, "rm", "--group", "study-of-lambda", "--yes")
    assert listed(capsys) == ["r-0004", "r-0002"]


def test_runs_are_selected_and_removed_by_filters(home, capsys):
    everything = listed(capsys)
    assert everything == ["r-0004", "r-0003", "r-0002", "r-0001"]
    assert listed(capsys, "--status", "finished", "--status", "queued") == [
        "r-0004", "r-0003", "r-0001",
    ]  # fmt: skip
    assert listed(capsys, "--older-than", "1h") == everything[1:]
    assert "12h" in told(capsys, "runs", "--older-than", "yesterday", code=2)
    told(capsys, "rm", "--older-than", "1s", "--status", "finished", "--yes")
    assert listed(capsys) == ["r-0004", "r-0002"]


def test_a_long_list_is_cut_and_says_so(home, capsys):
    with Registry.open(f"sqlite:///{home}/registry.db") as registry, registry.write_atomically():
        run = registry.run("r-0001")
        for seed in range(100, 150):
            submit(registry, seed=seed, name="many", spec=run.spec, queue=True)

    def shown(*arguments):
        assert main(["runs", *arguments]) == 0
        printed = capsys.readouterr()
        return [line.split()[0] for line in printed.out.splitlines()[1:] if line.strip()], printed

    capsys.readouterr()
    rows, printed = shown()
    assert rows[0] == "r-0054" and rows[-1] == "r-0005" and len(rows) == 50
    assert "4 older runs are not shown" in printed.err
    rows, printed = shown("--name", "many", "--status", "queued")
    assert len(rows) == 50 and printed.err == ""
    assert len(shown("--all")[0]) == 54
    assert len(listed(capsys)) == 54, "a program cannot read what is not shown"
