"""What `rlx eval --probe` refuses before any model is loaded; what it finds is in tests/run."""

from pathlib import Path

import pytest
from submissions import submit

from rlx.cli import main
from rlx.plan import read_spec

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "countdown_probe.yaml"


pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def run(registry, folder):
    """A run that has been submitted, and nothing more."""
    read = read_spec(EXPERIMENT)
    described = {"digest": read.spec.digest, "spec": read.spec.dump_resolved()}
    run = submit(registry, **described, yaml=read.document.text)
    root = folder / "home" / "runs" / run.id
    root.mkdir(parents=True)
    registry.update_run(run.id, directory=root)
    return root


def refused(capsys, *arguments):
    assert main(["eval", "--probe", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_run_that_has_exported_nothing_says_why(run, capsys):
    assert "r-0001 has not exported a model: it is submitted" in refused(capsys, "latest")


def test_a_finished_run_whose_model_is_gone(run, registry, capsys):
    registry.transition("r-0001", {"submitted"}, "running")
    registry.transition("r-0001", {"running"}, "finished")
    assert main(["eval", "--probe", "latest"]) == 4
    assert "home/runs/r-0001/model is gone" in capsys.readouterr().err


def test_a_folder_needs_an_experiment_and_an_experiment_a_folder(run, capsys):
    assert "--spec" in refused(capsys, run)
    assert "there is no folder r-0001" in refused(capsys, "r-0001", "--spec", EXPERIMENT)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "task.operators=+"], "a run is probed as it was trained"),
        (["--samples", "0"], "--samples"),
        (["--scheme", "early"], "early_answering"),
        (["--at", "0"], "--at is not for --probe"),
        (["--greedy"], "--greedy is not for --probe"),
    ],
)
def test_what_does_not_fit_is_said(run, capsys, arguments, said):
    model = run / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert said in refused(capsys, "latest", *arguments)
