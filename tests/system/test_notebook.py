"""From Python to a run: `rlx.submit` and the documented notebook, over a run that is there."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from patience import LIMIT

import rlx

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"


@pytest.fixture
def overrides(home, finished, monkeypatch):
    """Those of the run, in whose home the test is."""
    monkeypatch.setenv("RLX_HOME", str(home.path))
    monkeypatch.delenv("RLX_REGISTRY", raising=False)
    return [f"{path}={value}" for path, value in home.mirrored.items()]


def test_what_has_finished_is_not_run_again(home, finished, overrides, monkeypatch):
    monkeypatch.delattr("rlx.plan.run_rehearsal_checks")  # not even the rehearsal
    run = rlx.submit(home.yaml, *overrides)
    assert (run.id, run.wait().status) == (finished.id, "finished")
    assert run.metrics("train/grad_norm").index.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path, home, finished, overrides):
    notebook = nbformat.read(path, as_version=4)
    drawn = count_pictures(notebook)
    assert drawn == 2, "as it is stored"
    (parameters,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    parameters.source = f"experiment = {str(home.yaml)!r}\noverrides = {overrides!r}"
    NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": NOTEBOOKS}}).execute()
    assert count_pictures(notebook) == drawn
    assert rlx.submit(home.yaml, *overrides).id == finished.id, "it started no run of its own"


def test_a_cell_defines_a_reward_and_shows_a_bar_and_pictures(home, finished, overrides):
    cells = f"""
import rlx

def brevity(sample, *, longest: int = 40) -> float:
    return float(len(sample.response) <= longest)
---
short = {{"plugin": brevity, "turn": "answer"}}
experiment = rlx.read({{"extends": {str(home.yaml)!r}, "rewards": {{"turn": {{"short": short}}}}}})
print(experiment.spec.rewards.turn["short"].plugin)
---
run = rlx.open_run({finished.id!r}).wait()
---
run.plot()
"""
    made = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells.split("---"))])
    NotebookClient(made, timeout=LIMIT, resources={"metadata": {"path": home.folder}}).execute()
    _, named, bar, drawn = ([*cell.outputs] for cell in made.cells)
    assert re.fullmatch(r"brevity\.py@[0-9a-f]{16}:brevity\n", named[-1].text)
    assert "<progress value=" in bar[0].data["text/html"]
    assert 'alt="curves"' in drawn[-1].data["text/html"]


def count_pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)
