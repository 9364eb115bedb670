"""`study.py --rescore`: runs with rollouts are rescored, those without are left alone."""

import sys
from pathlib import Path

import pytest

from rlx_registry import Registry

STUDY = Path(__file__).parents[2] / "experiments" / "study"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    import study as found

    assert sys.modules["study"] is found
    return found


def test_a_run_without_rollouts_is_left_alone(study, tmp_path):
    import study_rescore

    file = tmp_path / "rescored.json"
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        run, _ = registry.submit(
            digest="d" * 16, seed=3, name="study-center", spec={"model": {}}, yaml="",
            plugins=[], code={}, environment={},
        )  # fmt: skip
        registry.start(run.id, ["submitted"])
        registry.transition(run.id, ["running"], "finished")
        study_rescore.rescore_runs(registry, {"d" * 16: "centred"}, file)
    assert not file.exists()
    assert study_rescore.read_rescored(file) == []


def test_what_was_rescored_is_of_recipes_and_on_the_page(study):
    from study_rescore import read_rescored

    every = [recipe for group in study.GROUPS.values() for recipe in group]
    labels = {d: recipe for recipe in every for d in study.list_digests(recipe)}
    page = (study.ROOT / "docs" / "study_tables.md").read_text(encoding="utf-8")
    rows = read_rescored()
    assert rows
    for run in rows:
        assert run["digest"] in labels
        for change in run["changes"]:
            figures = f"| {run['seed']} | {change['what']} | {change['n']:,} {change['unit']} |"
            assert f"{figures} {change['changed']} |" in page
