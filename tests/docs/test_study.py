"""What `make study` keeps of a run is enough to make the run known again, and no more."""

import gzip
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

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
    monkeypatch.setattr(study, "list_digests", lambda recipe: ("d" * 16, "e" * 16))
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
        own = [set(study.list_digests(recipe)) for recipe in recipes]
        assert len(set.union(*own)) == sum(map(len, own)), group
        assert len({recipe.label for recipe in recipes}) == len(recipes), group
    assert sys.modules["study"] is study


def test_no_group_has_an_experiments_name(study):
    """Such a group cannot be submitted."""
    specs = {recipe.spec for recipes in study.GROUPS.values() for recipe in recipes}
    assert not {read_spec(study.ROOT / spec).spec.name for spec in specs} & study.GROUPS.keys()


def test_what_is_kept_is_of_recipes(study):
    """A recipe that is changed or left out leaves nothing behind."""
    every = [recipe for recipes in study.GROUPS.values() for recipe in recipes]
    digests = {d for recipe in every for d in study.list_digests(recipe)}
    assert {file.name.partition("-")[0] for file in study.KEPT.glob("*.jsonl.gz")} <= digests


def test_stated_confidences_are_compared_with_one_bit_and_with_the_last_sum(study):
    import simple_rules

    def answer(n, result, correct, confidence):
        text = f"<think>1+2=3\n3*4={result}\n</think><answer>3*4</answer>"
        return {
            "problem_id": f"countdown/1-{n}=12",
            "stratum": f"{2 + n % 2} numbers",
            "text": text,
            "correct": correct,
            "confidences": [confidence],
        }

    assert simple_rules.is_target_reached(answer(1, 12, 1, 0.9))
    assert not simple_rules.is_target_reached(answer(1, 112, 1, 0.9))
    assert not simple_rules.is_target_reached({**answer(1, 12, 1, 0.9), "text": "12=12"})
    # Ranks are perfect and lie above .5; one answer in four misses the target and yet is right.
    answers = [
        answer(n, 11 if n % 8 in (0, 5, 6, 7) else 12, int(n % 8 < 6), 0.9 - 0.05 * (n % 8 >= 6))
        for n in range(80)
    ]
    table = simple_rules.compare_predictors([answers, answers], draws=20)
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in table.splitlines()}
    assert [row[1] for row in list(rows.values())[2:5]] == ["1.000", "0.500", "0.833"]
    assert rows["stated − stated, at least .5"][1] == "+0.500 [+0.500, +0.500]"
    assert rows["stated − last sum equals target"][1].startswith("+0.167 [+0.1")


def test_runs_that_are_kept_are_not_repeated(study, monkeypatch):
    recipe = study.GROUPS["study-arms"][0]
    stored, today = study.list_digests(recipe)
    runs = [
        SimpleNamespace(seed=seed, digest=digest, status=status)
        for seed, digest, status in (
            (0, stored, "finished"),
            (1, today, "finished"),
            (2, today, "stopped"),
            (3, "other", "finished"),
            (4, stored, "finished"),
        )
    ]
    known = SimpleNamespace(runs=lambda group: runs)
    monkeypatch.setattr(study, "registry", lambda: nullcontext(known))
    called = []
    monkeypatch.setattr(study, "rlx", lambda *arguments: called.append(arguments))
    study.train("study-arms", recipe)
    ((verb, spec, option, seeds, *_),) = called
    assert (verb, spec, option, seeds) == ("submit", recipe.spec, "--seeds", "2,3")
    runs[2:4] = [SimpleNamespace(seed=s, digest=today, status="finished") for s in (2, 3)]
    study.train("study-arms", recipe)
    assert len(called) == 1
