"""What plugins print goes to stderr, also while a progress bar is drawn there."""

import io
import sys

from rich.console import Console
from rich.progress import Progress

from rlx.plugin_calls import show_plugin_output


def test_a_plugin_may_print_while_a_progress_bar_is_drawn(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(stderr=True, force_terminal=True, width=60)
    with Progress(console=console), show_plugin_output("talker"):
        print("hello\x1b[2J")
    assert "talker: hello\\x1b[2J" in terminal.getvalue()


def test_the_stream_of_a_plugin_has_what_libraries_ask_of_one(tmp_path, monkeypatch):
    with (tmp_path / "err").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        with show_plugin_output("talker"):
            assert sys.stderr.fileno() == file.fileno()
            assert sys.stderr.encoding == file.encoding
            assert not sys.stderr.isatty()
