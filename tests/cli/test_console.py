"""What the terminal shows of hostile text: characters, never markup, codes or escapes."""

import io
import json
import re

import pytest
from rich.table import Table
from rich.text import Text

from rlx.cli import main
from rlx.cli.console import open_console
from rlx.cli.output import format_json, print_report, print_text
from rlx.cli.progress import ProgressDisplay
from rlx.cli.tables import print_table

EVIL = "[/INST][bold]x[/bold]:smile:\x1b[31m\x00\u202e\x7f\x9b"
SHOWN = "[/INST][bold]x[/bold]:smile:\\x1b[31m\\x00\\u202e\\x7f\\x9b"


@pytest.fixture
def shown():
    """A console, and a function that returns what it has printed so far."""
    console = open_console()
    console.file, console.width = io.StringIO(), 200
    return console, console.file.getvalue


def test_strings_titles_heads_and_cells_are_text(shown):
    console, read = shown
    table = Table(title=EVIL, caption=EVIL)
    table.add_column(EVIL, footer=EVIL)
    table.show_footer = True
    table.add_row(EVIL)
    console.print(EVIL)
    console.print(table)
    assert read().count(SHOWN) == 6
    assert read().replace("\n", "").isprintable()
    widths = {len(line) for line in read().splitlines() if line[:1] in "│┃┏└"}
    assert len(widths) == 1  # the layout counts what is printed


def test_styled_text_is_escaped_too(shown):
    console, read = shown
    console.print(Text.assemble((EVIL, "bold"), "\n", EVIL))
    assert read() == f"{SHOWN}\n{SHOWN}\n"


def test_bars_show_the_name_of_a_phase_as_text(shown):
    console, read = shown
    console._force_terminal = True
    with ProgressDisplay(console) as display:
        display.show(EVIL, 1, 2, EVIL)
    assert f"{SHOWN[:23]}…" in read() and SHOWN in read()
    assert "\x00" not in read() and "\u202e" not in read() and "\x1b[31m\\" not in read()


def test_lines_keep_their_ends(capsys):
    print_text(f"{EVIL}\n{EVIL}\r\nlast", nl=False)
    print_text("a\rb", err=True)
    out, err = capsys.readouterr()
    assert out == f"{SHOWN}\n{SHOWN}\r\nlast"
    assert err == "a\\rb\n"


def test_reports_are_escaped(capsys):
    print_report(f"error: {EVIL}")
    assert capsys.readouterr().err == f"error: {SHOWN}\n"


def test_json_is_of_printable_characters():
    text = format_json({EVIL: [EVIL]})
    assert text.isascii() and text.isprintable()
    assert json.loads(text) == {EVIL: [EVIL]}


def test_wrong_usage_repeats_what_was_typed_as_text(capsys):
    assert main(["status", "latest", f"--{EVIL}"]) == 2
    err = capsys.readouterr().err
    assert "\\x1b[31m" in err and not set(err) & set("\x1b\x00\u202e\x7f\x9b")


RUN = "r-0001"
WORDS = " ".join(f"word{number}" for number in range(40))


def test_a_pipe_has_no_width(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table("RUN", "WHY", rows=[(RUN, WORDS), ("r-0002", "short")])
    open_console().print(WORDS)
    head, first, second, text = capsys.readouterr().out.splitlines()
    assert first == f"{RUN}  {WORDS}" and text == WORDS
    assert (head, second) == ("RUN     WHY", "r-0002  short"), "no blanks at the ends of lines"


def test_progress_without_a_terminal_is_lines_with_the_time(capsys):
    with ProgressDisplay(open_console(stderr=True)) as display:
        for done in range(3):
            display.show("warm start", done, 2, f"loss {done}")
        display.show(EVIL, 0, None)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, "the beginning and the end of a stage"
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines)
    assert "warm start  0/2  loss 0" in lines[0] and "warm start  2/2  in 00:0" in lines[1]
    assert SHOWN in lines[2]
