"""Commands that the README and the pages show are commands of rlx, and of make."""

import re
from pathlib import Path

from rows import each_row

from rlx.cli.verb_group import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def list_code(page):
    """Lines of a page's code blocks, and its inline code."""
    text = page.read_text()
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S):
        yield from block.splitlines()
    yield from (line.strip() for line in re.findall(r"^ {4}\S[^\n]*", text, re.M))
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


@each_row("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    lines = list(list_code(page))
    verbs = {found[1] for line in lines if (found := re.match(r"rlx ([a-z][a-z-]*)", line))}
    targets = {found[1] for line in lines if (found := re.match(r"make ([a-z][a-z-]*)", line))}
    assert verbs - VERBS.keys() == set()
    assert targets - TARGETS == set()
