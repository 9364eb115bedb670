"""Texts that are up to no good, in every free text of a registry, change nothing on any page."""

import json
import re
import unicodedata
from pathlib import Path
from urllib.parse import quote

import pytest
from pages import Page, dashboard, leaves
from shown import shown, sure

from rlx_registry import Registry

CORPUS = {
    entry["name"]: entry["text"] * entry.get("times", 1)
    for entry in map(json.loads, Path(__file__).with_name("hostile.jsonl").read_text().splitlines())
}
SEVERAL = 3
"""Texts in one field, where they are short."""
SHORT = [name for name, text in CORPUS.items() if len(text) < 2000]
TEXTS = {
    ", ".join(names): " ".join(CORPUS[name] for name in names)
    for names in (
        *(SHORT[n : n + SEVERAL] for n in range(0, len(SHORT), SEVERAL)),
        *([name] for name in CORPUS if name not in SHORT),
    )
}
"""One registry each: the texts that are long have one of their own."""
PAGES = [
    "/",
    "/runs/r-0001",
    "/runs/r-0002",
    "/runs/r-0001/rollouts/3",
    "/runs/r-0001/rollouts/3/0",
    "/runs/r-0001/rollouts/3/3",
    "/runs/r-0001/rollouts/3/6",
]
POLLED = ["/live.json", "/runs/2/live.json"]
NEVER = {"Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"}
FIELDS = 20
"""At least so many values of the twins of all pages are the text, or have it in them."""


class Hostile:
    """A text, and what the dashboard says of a registry that is full of it."""

    def __init__(self, text, folder):
        with Registry.open(f"sqlite:///{folder}/registry.db") as registry:
            shown(registry, folder, text)
        self.text, self.client = text, dashboard(f"sqlite:///{folder}/registry.db")
        self.pages = {path: self.client.page(path) for path in PAGES}


@pytest.fixture(scope="module")
def shapes(plain):
    return {path: plain.page(path).shape for path in PAGES}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_changes_nothing_on_any_page(shapes, tmp_path, name):
    hostile = Hostile(TEXTS[name], tmp_path)
    for path, page in hostile.pages.items():
        assert page.shape == shapes[path], (path, unlike(page.shape, shapes[path]))
        check_characters(path, page)
        check_addresses(path, page)
    check_twins(hostile)
    for path in POLLED:
        response = hostile.client.get(path)
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
        assert response.text.isascii(), path


def unlike(found, expected):
    """Where two shapes part."""
    pairs = zip(found, expected, strict=False)
    first = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    return found[first - 1 : first + 2], expected[first - 1 : first + 2]


def check_characters(path, page):
    """Nothing on a page is invisible."""
    values = [v for _, name, v in page.attributes if v and name not in ("href", "action")]
    characters = set(page.text).union(*values)
    odd = {c for c in characters if c != "\n" and unicodedata.category(c) in NEVER}
    assert odd == set(), path


def check_addresses(path, page):
    """Every address stays on this server."""
    for tag, name, value in page.attributes:
        if name in ("href", "src", "action", "formaction", "xlink:href"):
            ours = re.match(r"/(?!/)|#[a-z]+(-\d+)?$|\?|http://127\.0\.0\.1:5000/#/", value)
            assert ours, (path, tag, value[:200])
            assert value.isascii() and value.isprintable(), (path, value[:200])


def check_twins(hostile):
    """The twins give the text back as it is kept: a lone surrogate is an escape in SQL, and no
    character in a body."""
    text, client = hostile.text, hostile.client
    kept = {text, sure(text), text.encode("utf-8", "backslashreplace").decode()}
    twins = {path: client.twin(path) for path in PAGES}
    found = [leaf for twin in twins.values() for leaf in leaves(twin) if isinstance(leaf, str)]
    assert len([leaf for leaf in found if any(one in leaf for one in kept)]) > FIELDS
    data = twins["/runs/r-0001"]
    assert data["spec"]["note"] == text
    assert data["events"][0]["payload"] == {"payload": text}
    assert data["run"]["name"] in kept and data["events"][0]["message"] in kept
    tree = twins["/runs/r-0001/rollouts/3"]["trees"][0]
    assert tree["rows"][0]["said"][0]["text"] == f"first {sure(text)}"
    assert twins["/runs/r-0001/rollouts/3/0"]["lines"][3]["text"] == f"{sure(text)}\n"


def test_filters_and_refusals_say_it_back_as_text(plain):
    expected = plain.page("/", params={"q": "nobody has this"}).shape
    refused = Page(plain.get("/runs/nobody").text).shape
    wrong = []
    for name, text in CORPUS.items():
        words = sure(text)[:150] or "x"
        missing = plain.get(f"/runs/{quote(words, safe='')}x")
        assert missing.status_code == 404, name
        shapes = plain.page("/", params={"q": f"nobody {words}"}).shape, Page(missing.text).shape
        if shapes != (expected, refused):
            wrong.append(name)
    assert wrong == []
