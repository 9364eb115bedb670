"""`rlx compare`: recipes by their digests, over seeds, in every form the same cells."""

import json
from pathlib import Path

import pytest
from submissions import submit

from rlx.cli import main
from rlx.plan import read_spec

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"
BRIER = {0: (0.12, 0.18), 1: (0.18, 0.25), 2: (0.15, 0.2)}


PROBLEMS = 40


def payload(seed, shift, others=False):
    """Answers to the same problems for the same seed; `shift` more of them are right."""
    ids = [f"{'z' if others else 'p'}{seed}-{n}" for n in range(PROBLEMS)]
    correct = [int(n < 20 + shift) for n in range(PROBLEMS)]
    stated = [None if n == 39 else 0.5 for n in range(PROBLEMS)]
    return {"problem_ids": ids, "strata": [""] * PROBLEMS, "correct": correct, "confidence": stated}


def finished(
    registry, seed, brier, *overrides, status="finished", name="rlcr", told=None, plugins=()
):
    spec = read_spec(RLCR, (f"seed={seed}", f"name={name}", *overrides)).spec
    described = {"digest": spec.digest, "seed": seed, "name": name, "spec": spec.dump_resolved()}
    run = submit(registry, **described, plugins=list(plugins), again=True)
    registry.start(run.id, ["submitted"])
    for label, value in (("before", 0.35), ("after", brier)):
        metrics = {"accuracy": 0.6, "brier": value, "ece": None}
        if told is not None:
            metrics |= {"mean_confidence": 0.5, "nll": 0.7}
        registry.results.add_evaluation(run.id, 9, label, "held_out", 600, metrics, told)
    registry.results.add_evaluation(
        run.id, 9, "after", "probe/early_answering", 3, {"accuracy": 0.1}
    )
    registry.transition(run.id, ["running"], status)
    return run.id


@pytest.fixture
def runs(registry):
    """Two recipes over three seeds, one seed of the first twice, and a run that was stopped."""
    other = ("estimator.confidence.normalize=std", 'rollout.confidence.template="su|re?"')
    stale = finished(registry, 0, 0.9)
    first = [finished(registry, seed, a) for seed, (a, _) in BRIER.items()]
    second = [finished(registry, seed, b, *other, name="sigma") for seed, (_, b) in BRIER.items()]
    return stale, first, second, finished(registry, 9, 0.5, status="stopped")


def told(capsys, *arguments):
    capsys.readouterr()
    assert main(["compare", *arguments]) == 0
    return capsys.readouterr().out


def test_recipes_are_told_apart_by_their_digests(runs, capsys):
    stale, first, second, stopped = runs
    found = json.loads(told(capsys, stale, *first, *second, stopped, "--json"))
    assert [r["label"] for r in found["recipes"]] == ["A", "B"]
    assert found["recipes"][0]["runs"] == {str(s): run for s, run in enumerate(first)}, "the newest"
    assert found["spec"] == {
        "estimator.confidence.normalize": ["center", "std"],
        "rollout.confidence.template": ["", "su|re?"],
    }
    assert found["left_out"] == {
        stale: f"{first[0]} has the same spec and seed, and is newer",
        stopped: "it is stopped",
    }
    figures = {(row["metric"], row["recipe"]): row for row in found["figures"]}
    assert {row["suite"] for row in found["figures"]} == {"held_out"}
    assert {metric for metric, _ in figures} == {"accuracy", "brier"}
    assert figures["brier", "A"]["mean"] == pytest.approx(0.15)
    assert figures["brier", "A"]["difference"] is None
    brier = figures["brier", "B"]
    assert (brier["mean"], brier["difference"]) == pytest.approx((0.21, 0.06))
    assert brier["p"] == 0.25, "three seeds can say no more"
    assert figures["accuracy", "B"]["p"] == 1


@pytest.fixture
def asked(registry, runs):
    """Three recipes over three seeds: two with the same problems, one with others."""
    kinds = {"base": ("phases.0.steps=7",), "better": ("phases.0.steps=8",)}
    kinds["elsewhere"] = ("phases.0.steps=9",)
    for number, (name, other) in enumerate(kinds.items()):
        for seed in range(3):
            answers = payload(seed, 5 * number, others=name == "elsewhere")
            finished(registry, seed, 0.2, *other, name=name, told=answers)
    return list(kinds)


def test_recipes_on_the_same_problems_are_paired_by_them(asked, capsys):
    base, better, elsewhere = asked
    found = json.loads(told(capsys, base, better, elsewhere, "--json"))
    different = "they were evaluated on different problems"
    assert found["not_by_problem"] == {"held_out": [None, None, different]}
    figures = {(row["metric"], row["recipe"]): row for row in found["figures"]}
    paired = {at for at, row in figures.items() if row["problems"] is not None}
    names = ("accuracy", "mean_confidence", "brier", "nll")
    assert paired == {(name, "B") for name in names}
    accuracy, stated = figures["accuracy", "B"], figures["mean_confidence", "B"]
    assert accuracy["problems"] == 3 * PROBLEMS
    assert accuracy["by_problem_difference"] == pytest.approx(15 / 120)
    assert accuracy["by_problem_difference_low"] > 0.05 and accuracy["by_problem_p"] < 0.001
    assert (stated["by_problem_difference"], stated["by_problem_p"]) == (0, 1)
    assert accuracy["by_problem_p_holm"] == accuracy["by_problem_p"], "C was not tested"


def test_p_values_are_corrected_for_the_number_of_recipes(registry, runs, capsys):
    _, first, second, _ = runs
    third = [finished(registry, seed, 0.9, "phases.0.steps=9") for seed in range(3)]
    names = [*first, *second, *third]
    figures = json.loads(told(capsys, *names, "--json"))["figures"]
    assert [f["p_holm"] for f in figures if f["metric"] == "brier"] == [None, 0.5, 0.5]


def test_a_group_is_compared_as_its_runs_joined_it(registry, runs, capsys):
    _, first, second, stopped = runs
    for run in (*second, stopped, *first):
        registry.join(run, "both")
    found = json.loads(told(capsys, "both", "--json"))
    assert [recipe["name"] for recipe in found["recipes"]] == ["sigma", "rlcr"]
    assert list(found["left_out"]) == [stopped]
    assert main(["compare", "botj"]) == 2
    assert "no run, group or experiment 'botj'; did you mean 'both'?" in capsys.readouterr().err


def test_a_recipe_of_several_versions_of_a_plugin_says_so(registry, runs, capsys):
    brevity = {"kind": "reward", "name": "brevity", "distribution": "short", "version": "1"}
    brevity |= {"sha256": "a", "options": {}, "data": {}, "entry_point": "x:y"}
    old = finished(registry, 4, 0.1, plugins=[brevity])
    new = finished(registry, 5, 0.2, plugins=[{**brevity, "data": {"words.txt": "b"}}])
    newest = finished(registry, 4, 0.1, plugins=[{**brevity, "sha256": "b"}])
    found = json.loads(told(capsys, old, new, newest, "--json"))
    assert found["left_out"] == {
        old: f"{newest} has the same spec and seed, and is newer; brevity changed between them"
    }
    assert found["mixtures"] == [f"A mixes plugins: brevity changed between {newest} and {new}."]


def test_an_option_that_a_plugin_filled_in_is_compared(registry, runs, capsys):
    """Runs of earlier versions do not have it in their spec, only among their plugins."""
    options = {"window": 4, "shape": {"slope": 1.0, "floor": 0}}
    record = {"kind": "estimator", "name": "two_level", "distribution": "rlx", "version": "1"}
    record |= {"sha256": "a", "options": options, "entry_point": "x:y"}
    left_out = finished(registry, 4, 0.1, plugins=[record])
    written = finished(registry, 4, 0.1, "estimator.window=4", plugins=[record])
    other = finished(
        registry, 4, 0.1, "estimator.shape={slope: 2}",
        plugins=[{**record, "options": {**options, "shape": {"slope": 2.0, "floor": 0}}}],
    )  # fmt: skip
    assert json.loads(told(capsys, left_out, written, "--json"))["spec"] == {}
    found = json.loads(told(capsys, written, other, "--json"))["spec"]
    assert found == {"estimator.shape.slope": [1.0, 2]}


def test_every_form_has_the_same_cells(registry, runs, capsys):
    first = runs[1]
    names = ["rlcr", "sigma"]
    again = finished(registry, 0, 0.4, status="failed")
    text, md = told(capsys, *names), told(capsys, *names, "--md")
    why = f"{again} is left out: it is failed; {first[0]} has the same spec and seed."
    assert why in " ".join(text.split()) and why in md
    assert "one of them has no comparable evaluation" in md
    for form in (text, md):
        for cell in ("What they differ in", "center", "+0.060 ± 0.025 (p 0.25)", "0.150 ± 0.075"):
            assert cell in form
    assert "| A | rlcr |" in md
    assert "su\\|re?" in md, "a bar ends no cell"


@pytest.mark.parametrize("form", [(), ("--md",)])
def test_values_of_templates_are_text(registry, runs, capsys, form):
    """No markup of rich, which would crash or be lost, and nothing that a terminal obeys."""
    evil = "[/INST][bold]\x1b[31m\u202e\0:smile:"
    template = f"rollout.confidence.template={json.dumps(evil)}"
    run = finished(registry, 0, 0.4, template, "evaluation.correct=accuracy")
    figures = {"accuracy": 0.6}
    registry.results.add_evaluation(run, 9, "after", f"held_out.{evil}", 600, figures)
    registry.results.add_evaluation(runs[1][0], 9, "after", f"held_out.{evil}", 600, figures)
    shown = told(capsys, runs[1][0], run, *form)
    assert "[/INST][bold]\\x1b[31m\\u202e" in shown.replace("\n", "")
    assert not set(shown) & set("\x1b\u202e\0")


def suite_record(registry, run, brier, name="shifted", **asked):
    said = {"name": name, "seed": 0, "problems": 300, "samples": 1, "greedy": False} | asked
    told = {"suite": {**said, "sets": {"near": {"problems": None, "set": {}}}}}
    registry.results.add_evaluation(
        run, 9, "after", f"suite/{name}/near", 9, {"brier": brier}, told
    )


def test_only_what_was_asked_alike_is_put_together(registry, runs, capsys):
    _, first, second, _ = runs
    for run in first:
        suite_record(registry, run, 0.2, problems=5 if run == first[0] else 300)
    for run in second:
        suite_record(registry, run, 0.5, samples=8)
    for seed, run in enumerate(first):
        suite_record(registry, run, 0.2, name="own", seed=seed)
    names = [*first, *second[:1]]
    found = json.loads(told(capsys, *names, "--json"))
    assert {(one["suite"], one["run"], one["why"]) for one in found["unlike"]} == {
        ("suite/shifted/near", first[0], "problems 5 instead of 300"),
        ("suite/shifted/near", second[0], "samples 8 instead of 1"),
    }
    seeds = {(row["suite"], row["recipe"]): row["seeds"] for row in found["figures"]}
    assert seeds["suite/shifted/near", "A"] == 2
    assert ("suite/shifted/near", "B") not in seeds
    assert seeds["suite/own/near", "A"] == 3, "its seed is the run's"
    why = [None, "one of them has no comparable evaluation with single answers"]
    assert found["not_by_problem"]["suite/shifted/near"] == why
    said = f"{second[0]} is left out, since it is not comparable: samples 8 instead of 1."
    for form in ((), ("--md",)):
        assert said in " ".join(told(capsys, *names, *form).split())


def test_what_cannot_be_compared(runs, capsys):
    *_, stopped = runs
    assert main(["compare", stopped]) == 2
    assert "nothing to compare yet" in capsys.readouterr().err
