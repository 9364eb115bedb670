"""What `make study` keeps of a run is enough to make the run known again, and no more."""

import gzip
import sys
from pathlib import Path

import pytest

from rlx.checks import read_spec
from rlx_registry import Registry

STUDY = Path(__file__).parents[2] / "experiments" / "study"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    import study as found

    return found


def known(url):
    with Registry.open(url, read_only=True) as registry:
        (run,) = registry.runs()
        told = [
            (e.step, e.label, e.suite, e.metrics, e.payload)
            for e in registry.results.evaluations("1")
        ]
        return run, told, registry.results.metrics(run.id), registry.list_run_groups(run.id)


def test_a_kept_run_is_known_to_another_registry(study, tmp_path, monkeypatch):
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    monkeypatch.setattr(study, "KEPT", tmp_path / "results")
    monkeypatch.setattr(study, "digest", lambda recipe: "d" * 16)
    monkeypatch.setenv("RLX_HOME", str(there))
    with Registry.open(f"sqlite:///{there}/registry.db") as registry:
        run, _ = registry.submit(
            digest="d" * 16, seed=3, name="study-center", spec={"model": {}}, yaml="",
            plugins=[], code={}, environment={},
        )  # fmt: skip
        folder = there / "runs" / run.id
        folder.mkdir(parents=True)
        registry.update_run(run.id, directory=folder, steps_total=2)
        registry.join(run.id, "study-arms")
        registry.start(run.id, ["submitted"])
        registry.results.add_metrics(run.id, 1, {"rewards/brier/mean": 0.7, "perf/step_s": 1.5})
        registry.results.add_event(run.id, "forms", "learner: grouped attention")
        pairs = {"problem_ids": ["p"], "strata": [""], "correct": [1], "confidence": [0.8]}
        registry.results.add_evaluation(run.id, 2, "after", "held_out", 1, {"brier": 0.04}, pairs)
        registry.update_run(run.id, step=2)
        registry.transition(run.id, ["running"], "finished")
    before = known(f"sqlite:///{there}/registry.db")

    study.keep("study-arms")
    (file,) = (tmp_path / "results").iterdir()
    assert file.name == f"{'d' * 16}-3.jsonl.gz"
    text = gzip.decompress(file.read_bytes()).decode()
    assert str(tmp_path) not in text and "perf/" not in text and "grouped attention" not in text

    monkeypatch.setenv("RLX_HOME", str(elsewhere))
    study.bring_back()
    study.bring_back()  # what is known is left alone
    run, told, metrics, groups = known(f"sqlite:///{elsewhere}/registry.db")
    assert (run.digest, run.seed, run.name, run.status, run.step, run.steps_total) == (
        *("d" * 16, 3, "study-center", "finished", 2, 2),
    )
    assert told == before[1] and groups == before[3] == ["study-arms"]
    assert metrics == {"rewards/brier/mean": [(1, 0.7)]}
    study.keep("study-arms")  # from what was brought back: the same
    assert gzip.decompress(file.read_bytes()).decode() == text


def test_every_recipe_is_an_experiment_of_its_own(study):
    for group, recipes in study.GROUPS.items():
        digests = [study.digest(recipe) for recipe in recipes]
        assert len(set(digests)) == len(recipes), group
        assert len({recipe.label for recipe in recipes}) == len(recipes), group
    assert sys.modules["study"] is study


def test_no_group_has_an_experiments_name(study):
    """Such a group cannot be submitted."""
    specs = {recipe.spec for recipes in study.GROUPS.values() for recipe in recipes}
    assert not {read_spec(study.ROOT / spec).spec.name for spec in specs} & study.GROUPS.keys()


def test_what_is_kept_is_of_recipes(study):
    """A recipe that is changed or left out leaves nothing behind."""
    digests = {study.digest(recipe) for recipes in study.GROUPS.values() for recipe in recipes}
    assert {file.name.partition("-")[0] for file in study.KEPT.glob("*.jsonl.gz")} <= digests
