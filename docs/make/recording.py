"""`make recording`: records the first commands of the README, as they run, for the README.

    python docs/make/recording.py [--again]

Runs the README's commands that begin with `rlx new` one after another, in an empty folder and in a
pseudo-terminal of 80 columns. Writes docs/first_minutes.cast, an asciinema recording with its real
times, and docs/first_minutes.gif, in which waits are shortened: a command takes at most eight
seconds there, and the last line states the real time. `--again` draws the picture of the recording
that is there. Takes about as long as training experiments/rlcr.yaml.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pyte
from PIL import Image, ImageColor, ImageDraw, ImageFont
from rlx_command import ROOT

CAST = ROOT / "docs" / "first_minutes.cast"
PICTURE = ROOT / "docs" / "first_minutes.gif"
COLUMNS, ROWS = 80, 30
LONGEST = 8.0
"""Seconds that a command takes in the picture at most."""
READING = 2.5
"""Seconds for which the picture shows what a command printed last."""
SHORTEST = 0.2
"""Seconds between two frames at least."""
STEPS = 6
"""Steps between background and color in which letters are smooth."""
LARGEST = 1_000_000
"""Maximum size of the recording and of the picture in bytes."""
PROMPT = "\x1b[1;32m$\x1b[0m "
INK, PAPER, FAINT = "#d8dee9", "#1c2128", "#8b949e"
ERASE, UP = "\x1b[2K", "\x1b[1A"
REDRAW = re.compile(
    f"(?P<erased>\\r{re.escape(ERASE)}(?:{re.escape(UP + ERASE)})*)(?P<written>.*)", re.DOTALL
)
"""How rich draws progress again."""
COLORS = {
    "default": INK, "black": "#3b4252", "red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341",
    "blue": "#79c0ff", "magenta": "#d2a8ff", "cyan": "#76e3ea", "white": INK,
    "brightblack": FAINT, "brightred": "#ffa198", "brightgreen": "#aff5b4",
    "brightbrown": "#f2cc60", "brightblue": "#a5d6ff", "brightmagenta": "#e2c5ff",
    "brightcyan": "#b3f0ff", "brightwhite": "#ffffff",
}  # fmt: skip


class Event(NamedTuple):
    """What a terminal received, and when, in seconds from the beginning."""

    time: float
    text: str


class Frame(NamedTuple):
    """What a terminal shows, for how many seconds of the picture, and at which real time."""

    rows: tuple[tuple[pyte.screens.Char, ...], ...]
    seconds: float
    time: float


def readme_commands() -> list[str]:
    """The commands of the README's block that begins with `rlx new`, without comments."""
    (block,) = re.findall(r"^(rlx new .*?)```", (ROOT / "README.md").read_text(), re.M | re.S)
    return [line.partition("  #")[0].rstrip() for line in block.splitlines()]


def run_in_terminal(command: str, folder: Path) -> Iterator[str]:
    """Yields what a command writes to a terminal, when it writes it.

    Raises:
        SystemExit: the command failed.
    """
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {"HOME", "LANG", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"}
    environment = {key: value for key, value in os.environ.items() if key in kept}
    process = subprocess.Popen(
        command,
        shell=True,
        cwd=folder,
        env={**environment, "PATH": search, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux reports the end of a terminal's last writer so
            break
        yield data.decode(errors="replace")
    os.close(ours)
    if process.wait():
        sys.exit(f"`{command}` ended with {process.returncode}")


def record(commands: Iterable[str], folder: Path) -> Iterator[Event]:
    """Runs commands and yields what the terminal received, each command after a prompt.

    Prints it too.
    """
    begin = time.monotonic()

    def received(text: str) -> Event:
        print(text, end="", flush=True)
        return Event(time.monotonic() - begin, text)

    for command in commands:
        yield received(f"{PROMPT}{command}\r\n")
        yield from map(received, run_in_terminal(command, folder))
    yield received(PROMPT)


def merge_redraws(events: Iterable[Event]) -> list[Event]:
    """Keeps one redrawing of progress lines in two seconds; the terminal shows the same afterwards.

    A redrawing erases lines and writes them again. Where the next one erases just these lines, only
    its text matters.
    """
    kept: list[Event] = []
    for event in events:
        redrawn = REDRAW.fullmatch(event.text)
        before = REDRAW.fullmatch(kept[-1].text) if kept else None
        if (
            redrawn
            and before
            and event.time < kept[-1].time + 2
            and redrawn["erased"].count(UP) == before["written"].count("\n")
        ):
            kept[-1] = Event(kept[-1].time, before["erased"] + redrawn["written"])
        else:
            kept.append(event)
    return kept


def write_cast(events: Iterable[Event], path: Path) -> None:
    """Writes events as an asciinema recording, version 2."""
    lines = [{"version": 2, "width": COLUMNS, "height": ROWS, "idle_time_limit": 2}]
    lines += [[round(event.time, 3), "o", event.text] for event in events]
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    check_size(path)


def read_cast(path: Path) -> list[Event]:
    """Reads the events of a recording."""
    with path.open(encoding="utf-8") as lines:
        _, *events = map(json.loads, lines)
    return [Event(seconds, text) for seconds, _, text in events]


def shorten_waits(events: list[Event]) -> list[float]:
    """The seconds of the picture at which each event is shown.

    A command that takes longer than `LONGEST` is shown evenly faster; its last output stays for
    `READING` before the next prompt.
    """
    starts = [n for n, event in enumerate(events) if event.text.startswith(PROMPT)]
    shown, at = [], 0.0
    for first, following in zip(starts, [*starts[1:], len(events)], strict=True):
        own = events[first:following]
        took = own[-1].time - own[0].time
        speed = max(1.0, took / LONGEST)
        shown += [at + (event.time - own[0].time) / speed for event in own]
        at = shown[-1] + READING
    return shown


def draw_frames(events: list[Event]) -> Iterator[Frame]:
    """What the terminal shows over time, at most every `SHORTEST` seconds."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    shown = shorten_waits(events)
    since = 0.0
    for event, following in zip(events, [*shown[1:], shown[-1] + READING], strict=True):
        stream.feed(event.text)
        if following - since >= SHORTEST or event is events[-1]:
            buffer = screen.buffer
            rows = tuple(tuple(buffer[y][x] for x in range(COLUMNS)) for y in range(ROWS))
            yield Frame(rows, following - since, event.time)
            since = following


class Painter:
    """Paints a terminal with the font that matplotlib brings along."""

    def __init__(self, size: int = 13) -> None:
        fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        self.fonts = {
            bold: ImageFont.truetype(fonts / f"DejaVuSansMono{'-Bold' * bold}.ttf", size)
            for bold in (False, True)
        }
        self.width = round(self.fonts[False].getlength("M"))
        self.height = sum(self.fonts[False].getmetrics())

    def paint(self, frame: Frame, whole: float) -> Image.Image:
        """Paints a frame, and below it how much of the whole time has passed."""
        size = (COLUMNS + 2) * self.width, (ROWS + 2) * self.height
        image = Image.new("RGB", size, PAPER)
        draw = ImageDraw.Draw(image)
        for y, row in enumerate(frame.rows):
            for x, cell in enumerate(row):
                self.paint_cell(draw, x, y, cell)
        clock = f"{format_time(frame.time)} of {format_time(whole)} · waits shortened"
        place = ((COLUMNS + 1 - len(clock)) * self.width, (ROWS + 0.8) * self.height)
        draw.text(place, clock, FAINT, self.fonts[False])
        return image

    def paint_cell(
        self, draw: ImageDraw.ImageDraw, x: int, y: int, cell: pyte.screens.Char
    ) -> None:
        """Paints one character."""
        ink = COLORS.get(cell.fg, f"#{cell.fg}")
        paper = PAPER if cell.bg == "default" else COLORS.get(cell.bg, f"#{cell.bg}")
        if cell.reverse:
            ink, paper = paper, ink
        left, top = (x + 1) * self.width, y * self.height + self.height // 2
        if paper != PAPER:
            draw.rectangle((left, top, left + self.width - 1, top + self.height - 1), paper)
        if cell.data.strip():
            draw.text((left, top), cell.data, ink, self.fonts[cell.bold])


def format_time(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def make_palette() -> Image.Image:
    """The colors of the terminal on its background, each in the steps of smooth letters."""
    inks = sorted({*COLORS.values(), FAINT})
    ground = Image.new("RGB", (len(inks), 1), PAPER)
    full = Image.new("RGB", ground.size)
    full.putdata([ImageColor.getrgb(ink) for ink in inks])
    steps = Image.new("RGB", (len(inks), STEPS + 1))
    for step in range(STEPS + 1):
        steps.paste(Image.blend(ground, full, step / STEPS), (0, step))
    return steps.quantize(256)


def write_picture(events: list[Event], path: Path) -> None:
    """Writes an animated GIF."""
    painter, whole = Painter(), events[-1].time
    frames = list(draw_frames(events))
    images = [painter.paint(frame, whole) for frame in frames]
    palette = make_palette()
    first, *others = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    durations = [round(1000 * frame.seconds) for frame in frames]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)
    print(f"\n{len(frames)} frames, {sum(durations) / 1000:.0f} s", end="")
    check_size(path)


def check_size(path: Path) -> None:
    """Prints the size of a file.

    Raises:
        SystemExit: it is larger than a README should load.
    """
    size = path.stat().st_size
    print(f"\n{path.name}: {size / 1000:.0f} kB")
    if size > LARGEST:
        sys.exit(f"{path} is larger than {LARGEST / 1000:.0f} kB")


def main() -> None:
    """Records the commands and draws the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true", help="draw the recording that is there")
    if parser.parse_args().again:
        events = read_cast(CAST)
    else:
        with tempfile.TemporaryDirectory(prefix="rlx-recording-") as folder:
            events = merge_redraws(record(readme_commands(), Path(folder)))
        write_cast(events, CAST)
    write_picture(events, PICTURE)


if __name__ == "__main__":
    main()
