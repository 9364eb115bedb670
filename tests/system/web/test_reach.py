"""Who can use the pages: by keyboard, by ear, on a telephone."""

import re

import pytest
from browsing import draw_sections

PAGES = {
    "runs": "/",
    "run": "/runs/r-0001",
    "rollouts": "/runs/r-0001/rollouts/6",
    "credit": "/runs/r-0001/rollouts/6/4",
    "environment": "/runs/r-0003/rollouts/3",
    "probe": "/runs/r-0004",
    "log": "/runs/r-0001/log",
}
CONTROLS = "main a[href], header a[href], button, input:not([type=hidden]), select, summary"
WITHOUT_NAME = (
    r"^\s*- (link|button|checkbox|textbox|searchbox|combobox|slider|img|progressbar)(:|$| \[)"
)
# Without the focus, Tab goes on from where something was unfolded.
FROM_THE_START = """() => {
    document.body.tabIndex = -1;
    document.body.focus();
    document.body.removeAttribute("tabindex");
    window.scrollTo(0, 0);
}"""

DESK, TELEPHONE = {"width": 1280, "height": 720}, {"width": 375, "height": 800}


@pytest.fixture(scope="module", params=PAGES)
def whole(request, enter, real):
    """A page as a telephone opens it, on which everything that fetches has and all is unfolded."""
    path = PAGES[request.param]
    visit = enter(real, viewport=TELEPHONE)
    page = visit.page
    page.goto(path)
    if "/rollouts/" in path and path.count("/") == 5:
        page.locator("body[data-ready]").wait_for()
    draw_sections(page)
    page.evaluate(
        "document.querySelectorAll('.fold[aria-expanded=false]').forEach((e) => e.click())"
    )
    page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    yield page
    visit.close()


@pytest.fixture
def narrow(whole):
    """The page on a telephone."""
    whole.set_viewport_size(TELEPHONE)
    return whole


@pytest.fixture
def wide(whole):
    """The page on a desk."""
    whole.set_viewport_size(DESK)
    return whole


def test_nothing_is_wider_than_a_telephone(narrow):
    page = narrow
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert page.locator("h1").first.bounding_box()["x"] >= 0
    too_wide = page.evaluate("""() => [...document.querySelectorAll("body *")].filter((e) => {
        const box = e.getBoundingClientRect();
        if (!box.width || box.right <= 376 || !e.checkVisibility()) return false;
        for (let p = e; p; p = p.parentElement)
          if (["auto", "scroll", "hidden"].includes(getComputedStyle(p).overflowX)) return false;
        return !e.closest(".skip");
      }).map((e) => e.localName + "." + e.className)""")
    assert too_wide == []
    for value in page.locator("#spec td.text, .mates td.text").all()[:1]:  # beside its name
        box = value.bounding_box()
        assert box["x"] + box["width"] <= 375


def test_every_control_can_be_reached_by_tab_and_has_a_name(wide):
    page = wide
    page.evaluate(FROM_THE_START)
    wanted = page.evaluate(
        """(controls) => [...document.querySelectorAll(controls)]
             .filter((e) => e.checkVisibility({ visibilityProperty: true })).length""",
        CONTROLS,
    )
    page.evaluate(
        """(controls) => {
             window.reached = new Set(); window.unseen = [];
             addEventListener("focusin", ({ target }) => {
               if (target.matches(controls)) reached.add(target);
               const { outlineStyle, outlineWidth } = getComputedStyle(target);
               if (outlineStyle === "none" || outlineWidth === "0px") unseen.push(target.outerHTML);
             });
           }""",
        CONTROLS,
    )
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip", (
        "the first skips to the content"
    )
    for _ in range(wanted + 20):
        page.keyboard.press("Tab")
    assert page.evaluate("reached.size") == wanted > 3
    assert page.evaluate("unseen") == [], "what has the focus is seen"
    tree = page.locator("body").aria_snapshot()
    assert re.findall(WITHOUT_NAME, tree, re.MULTILINE) == [], tree
    assert page.locator("main").count() == 1 and page.locator("h1").count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.title().endswith("rlx")
