"""Trees of three levels, and confidences with answers below: recorded, checked, rescored."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
from rows import each_row

SPEC = Path(__file__).with_name("levels.yaml")


@pytest.fixture(scope="module")
def levels(own_home):
    """The finished run, and its stored steps by the name of their phase."""
    home = own_home
    shutil.copy(SPEC, home.folder / "levels.yaml")
    run = home.submit("levels.yaml")
    bodies = [trees for _, trees, _ in home.bodies(run)]
    names = ["two_level", "gae", "grpo", "prompt", "first", "scale", "renorm"]
    return run, dict(zip(names, bodies, strict=True))


def list_turns(tree):
    """The turns of a tree with the turn above each, None above the first level."""
    segments = tree["segments"]
    for segment in segments:
        if segment["author"] == "policy":
            opening = segments[segment["parent"]]["parent"]
            yield segment, (None if opening < 0 else segments[opening])


def raw(segment, name):
    return next(reward["raw"] for reward in segment["rewards"] if reward["name"] == name)


def test_it_is_rescored_to_the_bit_and_holds_together(own_home, levels):
    run, _ = levels
    assert run.status == "finished"
    told = own_home.json("rescore", run.id)
    assert told["same"], [c for c in told["changes"] if c["changed"]]
    checked = own_home.json("check", run.id)
    assert checked["holds"] and not checked["unchecked"]


@each_row(
    ("phase", "kinds"),
    [
        ("two_level", {"answer": 3, "analysis": 6, "confidence": 12}),
        ("grpo", {"answer": 3, "analysis": 6, "confidence": 18}),
        ("first", {"confidence": 3, "answer": 6}),
    ],
)
def test_trees_have_the_levels_of_their_phase(levels, phase, kinds):
    for tree in levels[1][phase]:
        turns = [turn["kind"] for turn, _ in list_turns(tree)]
        assert {kind: turns.count(kind) for kind in turns} == kinds


def test_an_analysis_earns_the_mean_of_the_confidences_below_it(levels):
    for tree in levels[1]["two_level"]:
        turns = list(list_turns(tree))
        for turn, _ in turns:
            if turn["kind"] == "analysis":
                below = [raw(t, "brier") for t, above in turns if above is turn]
                assert len(below) == 2 and raw(turn, "passed_on") == pytest.approx(fmean(below))


def read_confidence(turn):
    (parts,) = [reward["parts"] for reward in turn["rewards"] if reward["name"] == "brier"]
    return json.loads(parts).get("confidence")


@each_row("phase", ["first", "prompt"])
def test_a_confidence_is_paid_for_the_mean_of_its_answers(levels, phase):
    seen = 0
    for tree in levels[1][phase]:
        turns = list(list_turns(tree))
        for turn, _ in turns:
            if turn["kind"] != "confidence" or (stated := read_confidence(turn)) is None:
                continue
            answers = [
                raw(t, "accuracy")
                for t, above in turns
                if t["kind"] == "answer" and (phase == "prompt" or above is turn)
            ]
            assert raw(turn, "brier") == pytest.approx(1 - (fmean(answers) - stated) ** 2)
            seen += 1
    assert seen


def test_rows_of_a_prompt_are_compared_where_asked(levels):
    """The advantages of a prompt's confidences add up to 0, those of one answer's do not."""
    every = {"answer", "analysis", "confidence"}
    for phase, kinds in (("grpo", every), ("prompt", {"confidence"})):
        alone = []
        for tree in levels[1][phase]:
            for kind in kinds:
                rows = [row for row in tree["rows"] if row["kind"] == kind]
                values = [next((a for a in r["advantages"] if a), 0.0) for r in rows]
                assert sum(values) == pytest.approx(0, abs=1e-4)
                if kind == "confidence":
                    alone.append(sum(values[: len(values) // 3]))
        assert any(abs(total) > 1e-3 for total in alone)


def test_held_out_answers_whose_confidences_nobody_can_read_have_no_figures_of_them(
    own_home, levels
):
    run, _ = levels
    with own_home.registry() as registry:
        records = {e.label: e for e in registry.results.evaluations(run.id, "held_out")}
    after = records["after"]
    assert after.payload["confidence"] == [None] * 6
    assert (after.metrics["n"], after.metrics["unparsable"]) == (6, 6)
    assert after.metrics.get("brier") is None
