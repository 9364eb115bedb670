"""The experiments of `docs/knowledge_graphs.md` are experiments that rlx takes."""

import re
from pathlib import Path
from textwrap import dedent

import yaml
from rows import each_row

from rlx.plan import check_file

PAGE = (Path(__file__).parents[3] / "docs" / "knowledge_graphs.md").read_text(encoding="utf-8")
BLOCKS = [dedent(block) for block in re.findall(r"(?:^(?: {4}.*)?\n)+", PAGE, re.MULTILINE)]


def facts():
    for i in range(60):
        yield f"part/{i}\tmade_by\tfirm/{i % 20}\npart/{i}\trlx:kind\tpart\n"
    for i in range(20):
        yield f"firm/{i}\tseat\ttown/{i % 7}\nfirm/{i}\trlx:kind\tfirm\n"


def of_ones_own(folder):
    """The page's experiment about a graph of one's own, beside such a graph."""
    (text,) = (block for block in BLOCKS if "name: parts" in block)
    (folder / "parts.tsv").write_text("".join(facts()))
    path = folder / "parts.yaml"
    path.write_text(text)
    return path


def test_a_graph_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, plugins = check_file(of_ones_own(tmp_path))
    assert plugins.warnings == ()
    plugins.task.check()
    plugins.environment.check()
    assert plugins.task.data() == plugins.environment.data()


@each_row("block", [block for block in BLOCKS if "\n  global:" in block])
def test_weights_of_rewards(block, tmp_path):
    spec = yaml.safe_load(of_ones_own(tmp_path).read_text())
    changes = {"evaluation": {"correct": "_exact"}} | yaml.safe_load(block)
    if changes["evaluation"]["correct"] == "_exact":
        changes["rewards"]["global"]["_exact"] = {"plugin": "kg.exact_match"}
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(spec | changes))
    _, plugins = check_file(path)
    assert plugins.warnings == ()
