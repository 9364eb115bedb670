"""Trees of three levels, and confidences with answers below: recorded, checked, rescored."""

import shutil
from pathlib import Path

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


def test_it_is_rescored_to_the_bit_and_holds_together(own_home, levels):
    own_home.check_record(levels[0].id)


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
        turns = [s["kind"] for s in tree["segments"] if s["author"] == "policy"]
        assert {kind: turns.count(kind) for kind in turns} == kinds


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
