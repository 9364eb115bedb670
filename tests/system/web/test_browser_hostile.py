"""Hostile texts in a real browser: nothing runs, nothing is fetched, nothing is another element."""

import json
from pathlib import Path

import pytest
from browsing import draw_sections, served
from shown import shown

from rlx_registry import Registry

HOSTILE = Path(__file__).parents[2] / "web" / "hostile.jsonl"
CORPUS = [
    (entry["name"], entry["text"] * entry.get("times", 1))
    for entry in map(json.loads, HOSTILE.read_text().splitlines())
]
SEVERAL = 16
"""Texts in one field, where they are short: fewer share a registry without a browser."""
HUGE = 50_000
"""Characters of a huge line: without a browser it has them all."""
SHORT = [text for _, text in CORPUS if len(text) < 2000]
TEXTS = {
    **{str(n): " ".join(SHORT[n : n + SEVERAL]) for n in range(0, len(SHORT), SEVERAL)},
    "a huge line": dict(CORPUS)["a huge line"][:HUGE],
}
PAGES = (
    "/",
    "/runs/r-0001",
    "/runs/r-0001/rollouts/3",
    "/runs/r-0001/rollouts/3/0",
)
# Names of elements and of their attributes, in order: classes too, but for the pointer's.
SHAPE = """() => [...document.querySelectorAll("*")].map((e) => {
  let depth = 0;
  for (let p = e.parentElement; p; p = p.parentElement) depth += 1;
  const names = e.getAttributeNames().join(" ");
  return `${depth} ${e.localName} ${names} ${e.getAttribute("class") ?? ""}`;
})"""

# At the middle of a chart, wherever the page has moved it meanwhile.
POINT = """(over) => {
  const box = over.getBoundingClientRect();
  const at = { clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, bubbles: true };
  for (const name of ["mouseenter", "mousemove", "mouseleave"])
    over.dispatchEvent(new MouseEvent(name, at));
}"""


def settled(page, path):
    """Opens a page and has its scripts do all that they do."""
    page.goto(path)
    page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    draw_sections(page)
    for chart in page.locator("[data-section] figure .u-over").all():
        chart.evaluate(POINT)
    if path.endswith("/0"):
        page.locator("body[data-ready]").wait_for()
        for _ in range(5):
            page.keyboard.press("ArrowRight")
        page.wait_for_function("document.querySelectorAll('#rows tr').length === 5")
    page.mouse.move(0, 0)
    return page.evaluate(SHAPE)


@pytest.fixture(scope="module")
def shapes(enter, plain_site):
    one = enter(plain_site)
    found = {path: settled(one.page, path) for path in PAGES}
    one.close()
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_happens(enter, shapes, tmp_path, name):
    with Registry.open(f"sqlite:///{tmp_path}/registry.db") as registry:
        shown(registry, tmp_path, TEXTS[name])
    with served(f"sqlite:///{tmp_path}/registry.db") as address:
        one = enter(address)
        for path in PAGES:
            found = settled(one.page, path)
            unlike = [pair for pair in zip(found, shapes[path], strict=False) if len(set(pair)) > 1]
            assert found == shapes[path], (path, unlike[:3])
        one.page.goto("/")
        assert one.page.evaluate("document.title").endswith("rlx")
        one.close()
