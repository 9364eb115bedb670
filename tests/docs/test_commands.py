"""Commands that the README and the pages show are commands of rlx with its options, or of make."""

import re
from pathlib import Path

import click
from rows import each_row

from rlx.cli.verb_group import VERBS, rlx_command

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


def list_options(verb):
    """The long options of a verb and of the verbs below it."""
    context = click.Context(rlx_command)
    command = rlx_command.get_command(context, verb)
    below = getattr(command, "commands", {}).values()
    parameters = [parameter for one in (command, *below) for parameter in one.params]
    return {"--help"} | {name for p in parameters for name in (*p.opts, *p.secondary_opts)}


@each_row("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    lines = list(list_code(page))
    verbs = {found[1] for line in lines if (found := re.match(r"rlx ([a-z][a-z-]*)", line))}
    targets = {found[1] for line in lines if (found := re.match(r"make ([a-z][a-z-]*)", line))}
    assert verbs - VERBS.keys() == set()
    assert targets - TARGETS == set()
    for line in lines:
        found = re.match(r"rlx ([a-z][a-z-]*)([^|&;#>]*)", line)
        if found:
            shown = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", found[2]))
            assert shown - list_options(found[1]) == set(), line
