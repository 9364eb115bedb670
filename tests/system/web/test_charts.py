"""The charts of a page: what comes first, values without scripts, zoom, hover."""

import base64
import hashlib
import json
from pathlib import Path

import pytest
from browsing import draw_sections

import rlx_web

RUN = "/runs/r-0001"
LIBRARY = Path(rlx_web.__file__).parent / "static" / "uplot"


def chart(page, title):
    return page.locator("figure.chart", has=page.get_by_title(title, exact=True))


def axis(page, title):
    """The steps at both ends of a chart, as the pointer says them there."""
    over = chart(page, title).locator(".u-over")
    ends = []
    for x in (1, over.bounding_box()["width"] - 2):
        over.hover(position={"x": x, "y": 40})
        ends.append(chart(page, title).locator(".legend > .faint").inner_text())
    return ends


@pytest.fixture
def drawn(visit, plain_site):
    """The page of a run with every chart drawn."""

    def begin(query="", **options):
        page = visit(plain_site, **options)
        page.goto(f"{RUN}{query}")
        draw_sections(page)
        return page

    return begin


def test_without_scripts_every_metric_has_its_newest_value(visit, plain_site, known):
    page = visit(plain_site, java_script_enabled=False)
    page.goto(RUN)
    values = known.queries.last_values(["r-0001"], known.queries.metric_names("r-0001"))["r-0001"]
    said = page.locator("figure.chart .legend b").all_text_contents()
    assert sorted(map(float, said)) == pytest.approx(
        sorted(v for _, v in values.values()), rel=1e-3
    )
    assert page.locator("#plots").is_hidden(), "no advice on what cannot be done"


def test_a_drag_zooms_every_chart(drawn):
    page = drawn()
    assert axis(page, "odd") == ["step 1", "step 3"]
    over = chart(page, "odd").locator(".u-over")
    box = over.bounding_box()
    page.mouse.move(box["x"] + 0.45 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.98 * box["width"], box["y"] + 20, steps=4)
    page.mouse.up()
    assert axis(page, "by turn") == ["step 2", "step 3"], "another chart"
    chart(page, "by turn").locator(".u-over").dblclick()
    assert axis(page, "odd") == ["step 1", "step 3"]


def test_the_vendored_library_is_the_released_one():
    record = json.loads((LIBRARY / "vendored.json").read_text())
    files = {p.name: p.read_bytes() for p in LIBRARY.iterdir() if p.name != "vendored.json"}
    found = {name: f"sha256-{hashlib.sha256(text).hexdigest()}" for name, text in files.items()}
    assert found == record["files"]
    assert b"MIT" in files["LICENSE"] and record["license"] == "MIT"
    assert len(base64.b64decode(record["integrity"].removeprefix("sha512-"))) == 64
    assert f"(v{record['version']})".encode() in files["uPlot.esm.js"]
