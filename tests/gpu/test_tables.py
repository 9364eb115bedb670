"""The tables of docs/gpu.md that the mirrored GPU can check: waits, and mutants."""

import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import test_mirrored
import test_mirrored_transfer
import waits

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


def read_table(heading):
    """Rows of the table with this heading, as tuples of cells."""
    _, _, below = PAGE.partition(f"| {' | '.join(heading)} |\n")
    lines = below.partition("\n\n")[0].splitlines()[1:]
    return [tuple(line.strip("| ").split(" | ")) for line in lines]


def test_waits_are_those_of_the_page():
    rows = waits.list_rows()
    assert rows == read_table(waits.HEADING), "python tests/gpu/waits.py prints the table"
    steps = [where for work, where, *_ in rows if work.startswith("decoding step")]
    assert set(steps) == {"`sampler/transformers_engine.py: run`"}, "none in a captured step"


def test_every_mutant_is_in_the_table():
    mutants = [*test_mirrored.MOVES, *test_mirrored.CAPTURES]
    names = [f"{owner.__name__}.{name}" for owner, name, *_ in mutants]
    names += ["AttentionChains.from_positions"] * len(test_mirrored.CHAIN_PARTS)
    names += ["_build_ancestor_masks"]
    unordered = [(owner.__name__, name) for owner, name, *_ in test_mirrored.UNORDERED]
    names += [f"{owner.rpartition('.')[2]}.{name}" for owner, name in unordered]
    names += ["collect_weights"] * len(test_mirrored_transfer.MUTANTS)
    rows = read_table(("function", "what the mutant does", "found by"))
    assert Counter(re.sub("`", "", row[0]) for row in rows) == Counter(names)
