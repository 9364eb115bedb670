"""The recording of the README's first commands, and the command that makes it."""

import json

import pyte
import pytest
from PIL import Image
from recording import (
    CAST,
    COLUMNS,
    ERASE,
    LARGEST,
    LONGEST,
    PICTURE,
    PROMPT,
    READING,
    ROWS,
    UP,
    Event,
    merge_redraws,
    read_cast,
    readme_commands,
    record,
    shorten_waits,
    write_cast,
    write_picture,
)


def test_commands_are_recorded_in_a_terminal(tmp_path):
    commands = ["stty size; touch here", "ls here; printf '\\033[31mred\\033[0m'"]
    cast, picture = tmp_path / "some.cast", tmp_path / "some.gif"
    events = list(record(commands, tmp_path))
    write_cast(events, cast)
    head = json.loads(cast.read_text().splitlines()[0])
    assert (head["version"], head["width"], head["height"]) == (2, COLUMNS, ROWS)
    text = "".join(event.text for event in read_cast(cast))
    assert text == "".join(event.text for event in events)
    first, second = (f"{PROMPT}{command}\r\n" for command in commands)
    assert text.startswith(f"{first}{ROWS} {COLUMNS}\r\n{second}here\r\n")
    assert text.endswith(f"\x1b[31mred\x1b[0m{PROMPT}")
    write_picture(events, picture)
    with Image.open(picture) as image:
        assert image.n_frames > 1
        image.seek(image.n_frames - 1)
        colors = {color for _, color in image.convert("RGB").getcolors()}
    assert any(red > 200 and max(green, blue) < 150 for red, green, blue in colors)


def test_a_failing_command_ends_the_recording(tmp_path):
    with pytest.raises(SystemExit, match="`exit 3` ended with 3"):
        list(record(["exit 3"], tmp_path))


def show(events):
    """The lines of a terminal after it received the events."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    for event in events:
        stream.feed(event.text)
    return [line.rstrip() for line in screen.display]


def test_redrawn_progress_is_thinned_out():
    one, two = ERASE.join(("\r", "")), f"\r{ERASE}{UP}{ERASE}"
    drawn = [Event(0.0, f"first\r\n{one}"), Event(0.1, f"{one}a 0/9")]
    drawn += [Event(0.2 + n / 10, f"{one}a {n}/9") for n in range(1, 20)]
    drawn += [Event(2.3, f"{one}a 9/9\r\nb 0/9")]
    drawn += [Event(2.4 + n / 10, f"{two}a 9/9\r\nb {n}/9") for n in range(1, 20)]
    drawn += [Event(4.5, "\r\nlast\r\n")]
    kept = merge_redraws(drawn)
    assert len(kept) < len(drawn) / 4
    assert show(kept) == show(drawn)
    assert show(kept)[:4] == ["first", "a 9/9", "b 19/9", "last"]
    assert [event.time for event in kept] == sorted(event.time for event in kept)


def test_waits_are_shortened():
    start = Event(100.0, f"{PROMPT}slow\r\n")
    slow = [Event(100.0 + 10 * n, "x") for n in range(1, 11)]
    quick = [Event(200.0, f"{PROMPT}quick\r\n"), Event(201.0, "y")]
    shown = shorten_waits([start, *slow, *quick])
    assert shown[0] == 0
    assert shown[1:11] == pytest.approx([LONGEST * n / 10 for n in range(1, 11)])
    assert shown[11:] == pytest.approx([LONGEST + READING, LONGEST + READING + 1])


def test_the_readme_shows_the_recording_of_its_commands():
    text = "".join(event.text for event in read_cast(CAST))
    assert [line.partition("\r\n")[0] for line in text.split(PROMPT)[1:-1]] == readme_commands()
    assert PICTURE.stat().st_size <= LARGEST
