"""Names of the sources: what docs/sources.md says of them is there."""

import re
from importlib import import_module
from pathlib import Path

from rlx.plan import check_file
from rlx.spec.reading import list_leaf_values
from rlx_registry import fill_plugin_options

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
ROWS = re.compile(r"^\| (`.*) \| (`.*`) \| `([\w.]+):(\w+)` \|$", re.MULTILINE)


def resolve(name):
    """Every value of an experiment, defaults included, by path."""
    read, plugins = check_file(EXPERIMENTS / name)
    values = fill_plugin_options(read.spec.dump_resolved(), plugins.list_records())
    return dict(list_leaf_values(values))


def list_section_keys(values):
    """Paths without the names of rewards, and all that they begin with."""
    paths = (re.sub(r"^(rewards\.\w+)\.\w+", r"\1.NAME", path).split(".") for path in values)
    return {".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}


def test_every_name_of_the_index_has_its_key_and_its_function():
    page = (ROOT / "docs" / "sources.md").read_text().partition("## Names in the sources")[2]
    rows = ROWS.findall(page.partition("\n## ")[0])
    known = set()
    for file in ("kg_r1", "kg_r1_grpo", "countdown_faithfulness", "rlcr_two_turn", "rlcr_math_7b"):
        known |= list_section_keys(resolve(f"sources/{file}.yaml"))
    keys = {key for _, keys, _, _ in rows for key in re.findall(r"`([^`]+)`", keys)}
    assert keys - known == set()
    lacking = [f"{m}:{name}" for *_, m, name in rows if not hasattr(import_module(m), name)]
    assert lacking == []
    names = " ".join(row[0] for row in rows)
    for name in ("KGFormatMultiTurnRewardManager", "compute_score", "brier_reward", "loss_mask"):
        assert f"`{name}`" in names
