"""`rlx plugins`: the list, one plugin's page, promises checked, and a distribution begun."""

import json
from pathlib import Path

import pytest
from guests import installed

from rlx.cli import main

pytestmark = pytest.mark.usefixtures("folder")
MODULE = '''
from typing import Annotated
from pydantic import Field
from rlx.plugin import reward

@reward(scope="group")
def listed(samples, *, limit: Annotated[int, Field(ge=1, description="Most.")] = 3):
    """By the length of the list."""
    return [float(len(samples) <= limit) for _ in samples]

@reward
def plaintive(sample):
    """Complains of empty text."""
    return 1 / len(sample.response)

@reward
def countdown(sample):
    """A name that is taken."""
    return 1.0
'''
POINTS = """
[rlx.rewards]
listed = page_guest:listed
plaintive = page_guest:plaintive
countdown = page_guest:countdown
"""


@pytest.fixture
def guest(folder, monkeypatch):
    with installed(folder, monkeypatch, "rlx-page-guest", POINTS, page_guest=MODULE):
        yield


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_a_clash_is_a_row_that_says_what_to_write(guest, capsys):
    assert main(["plugins", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    states = {(r["name"], r["kind"], r["from"].split()[0]): r["state"] for r in rows}
    assert states["countdown", "reward", "rlx"] == "clash: say rlx:countdown"
    assert states["countdown", "reward", "rlx-page-guest"] == "clash: say rlx-page-guest:countdown"
    assert states["countdown", "task", "rlx"] == "ok"
    assert main(["plugins", "show", "countdown"]) == 3
    assert main(["plugins", "show", "rlx-page-guest:countdown"]) == 0


def test_a_functions_options_and_scope(guest, capsys):
    assert main(["plugins", "show", "listed"]) == 0
    out = lines(capsys)
    assert "Looks at all turns of one kind for one prompt, together." in out
    assert out[-1].split() == ["limit", "int", "≥", "1", "3", "Most."]


def test_check_prints_a_line_for_each_promise(guest, capsys):
    assert main(["plugins", "check", "listed"]) == 0
    out = lines(capsys)
    assert out[0] == "listed  (reward, rlx-page-guest 1.0)"
    assert "  ✓ ignores the order of samples" in out
    assert out[-1].startswith("  all ")


def test_a_broken_promise_says_why_and_what_to_do(guest, capsys):
    assert main(["plugins", "check", "plaintive"]) == 3
    out = lines(capsys)
    place = out.index("  ✗ tolerates hostile text: empty text: ZeroDivisionError: division by zero")
    assert out[place + 1].startswith("      = help: ")
    assert out[-1].endswith(" kept, 1 broken")


def test_what_cannot_be_checked(guest, capsys, subtests):
    for arguments, code, says in (
        (["mixture"], 2, "without tasks: use `--option tasks=VALUE`"),
        (["listed", "--option", "limit=much"], 2, "must be a whole number"),
        (["listed", "--option", "limt=1"], 2, "did you mean 'limit'?"),
        (["rlx:countdown", "--option", "ops=prompt"], 2, "add --kind"),
        (["countdwn"], 3, "did you mean 'countdown'?"),
        (["listed", "--kind", "task"], 3, "provides no task plugin"),
        (["listed", "--kind", "rewards"], 2, "Invalid value for '--kind'"),
        (["./nowhere"], 3, "no plugin named './nowhere'"),
        (["."], 3, "installed first, with `pip install -e PATH`"),
    ):
        with subtests.test(arguments=arguments, code=code, says=says):
            assert main(["plugins", "check", *arguments]) == code
            out, err = capsys.readouterr()
            assert says in out + err


def test_names_that_will_not_do(capsys, subtests):
    for name, says in (
        ("Brief-Answer", "use a to z, 0 to 9 and _, beginning with a letter"),
        ("\x1b[2J", "\\x1b[2J"),
        ("class", "no word of Python or kind of plugin"),
        ("reward", "no word of Python or kind of plugin"),
        ("countdown", "provided by rlx"),
    ):
        with subtests.test(name=name, says=says):
            assert main(["plugins", "new", name]) == 2
            assert says in capsys.readouterr().err
            assert list(Path().iterdir()) == []


def test_nothing_is_overwritten(capsys):
    folder = Path("rlx-length-penalty")
    assert main(["plugins", "new", "length_penalty"]) == 0
    said = ["pip install -e ./rlx-length-penalty && rlx plugins check length_penalty"]
    assert lines(capsys) == said
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert main(["plugins", "new", "length_penalty"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
