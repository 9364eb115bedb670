"""The suites that are shipped: each fits its experiments, and asks what their models can read."""

from pathlib import Path

import pytest

from rlx.cli import main
from rlx.cli.output import print_text
from rlx.errors import SpecError
from rlx.model import load_local_dialogue
from rlx.phase_setup import build_setup
from rlx.plan import read_spec
from rlx.results import TrainedModel, build_requested_suite, build_set_spec
from rlx.spec.reading import read_suite
from rlx.spec.reading.reader import read_document

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
FOR = {
    "suites/rlcr": ["rlcr_asked", "rlcr_coupled"],
    "suites/arithmetic": ["rlcr", "rlcr_asked", "rlcr_coupled"],
    "suites/kg": ["kg", "kg_gae", "kg_grpo"],
    "study/suites/study": ["rlcr", "rlcr_exact", "study/center", "study/coupled"],
}
"""Experiments whose models each suite is for; those on GPUs have tests of their own."""


def test_a_suite_fits_its_experiments(monkeypatch, subtests):
    for suite, experiment in [(suite, name) for suite, names in FOR.items() for name in names]:
        with (
            subtests.test(suite=suite, experiment=experiment),
            monkeypatch.context() as monkeypatch,
        ):
            monkeypatch.chdir(ROOT)
            document = read_document(EXPERIMENTS / f"{experiment}.yaml")
            target = TrainedModel(experiment, document, "nowhere", None)
            asked = read_suite(EXPERIMENTS / f"{suite}.yaml")
            for name, one in asked.sets.items():
                spec = build_set_spec(target, name, one, ())
                task, speech = build_setup(spec).task, load_local_dialogue(spec.model)
                problems = [
                    task.problem("test", n, 0) for n in range(one.problems or asked.problems)
                ]
                for problem in problems:
                    speech.open(problem.prompt, problem.system)  # says what it has no token for
                assert len({problem.id for problem in problems}) > 0.2 * len(problems), name


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, "shifted"),
        ({"problems": 70, "samples": 2, "seed": 0}, "shifted.problems-70"),
        ({"samples": 1, "greedy": True, "seed": 3}, "shifted.samples-1.greedy.seed-3"),
    ],
)
def test_what_departs_from_a_suite_is_part_of_its_name(tmp_path, asked, name):
    """It has a set with its own number of problems, which 70 of every set are not."""
    path = tmp_path / "suite.yaml"
    path.write_text("{name: shifted, problems: 70, samples: 2, sets: {a: {}, b: {problems: 20}}}")
    spec = read_spec(ROOT / "experiments" / "rlcr.yaml").spec
    assert build_requested_suite(spec, path, asked, print_text).name == name
    assert build_requested_suite(spec, None, asked, print_text).name.startswith("own")
    path.write_text("{name: own, sets: {a: {}}}")
    with pytest.raises(SpecError, match="choose another name"):
        build_requested_suite(spec, path, asked, print_text)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ("sets: {a: {set: {task.nmbers: [3]}}}", "set 'a' of the suite"),
        ("set: {a: {}}", "unknown key 'set'"),
    ],
)
def test_a_suite_that_cannot_be_is_refused(tmp_path, sets, says):
    path = tmp_path / "suite.yaml"
    path.write_text(f"name: x\n{sets}\n")
    target = TrainedModel("rlcr", read_document(EXPERIMENTS / "rlcr.yaml"), "nowhere", None)
    with pytest.raises(SpecError, match=says):
        build_set_spec(target, "a", read_suite(path).sets["a"], ())


@pytest.mark.parametrize("option", ["--out", "--pictures"])
def test_where_nothing_can_be_written_nothing_is_answered(tmp_path, capsys, option):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "below"
    assert main(["eval", "nobody", option, str(place)]) == 4
    assert f"cannot write {place}" in capsys.readouterr().err


def test_greedy_answers_are_taken_once(capsys):
    spec = read_spec(ROOT / "experiments" / "rlcr.yaml").spec
    suite = build_requested_suite(spec, None, {"samples": 3, "greedy": True}, print_text)
    assert (suite.samples, suite.name) == (1, "own.greedy")
    assert "3 greedy answers would be identical" in capsys.readouterr().err
