"""Who can use the pages: by keyboard, by ear, on a telephone, while a run goes on."""

import re

import pytest
from browsing import draw_sections, served
from shown import submit

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


# While a run goes on -----------------------------------------------------------------------------


@pytest.fixture
def alive(chromium, url, registry):
    """A run that goes on, and the address of its dashboard."""
    run = submit(registry, status="running")
    registry.update_run(run, step=1, steps_total=10, phase="one")
    for step in (0, 1):
        registry.results.add_metrics(run, step, {"train/reward": step / 4, "perf/step_s": 1.0})
    with served(url) as address:
        yield run, address


def waited(page):
    """Lets the time pass after which a page asks again."""
    with page.expect_response("**/live.json*"):
        page.clock.fast_forward(5100)


def test_the_page_of_a_run_goes_on_with_it(alive, visit, registry):
    run, address = alive
    page = visit(address)
    page.clock.install()
    page.goto(f"/runs/{run}")
    for part in page.locator("details.curves, #happened").all():
        part.locator("> summary").click()
    chart = page.locator("figure.chart", has_text="by turn")
    chart.locator("canvas").wait_for()
    assert chart.locator(".legend b").inner_text() == "0.25"
    registry.results.add_metrics(run, 2, {"train/reward": 0.5, "perf/step_s": 1.0})
    registry.results.add_event(run, "note", "something\x1b[31m <b>happened</b>", level="warning")
    registry.update_run(run, step=2, phase="two\u202e")
    waited(page)
    page.locator("[data-field=step]", has_text="2").wait_for()
    assert page.locator("[data-field=phase]").inner_text() == "two⟨U+202E⟩"
    assert page.locator("progress.steps").evaluate("e => e.value") == 2
    assert chart.locator(".legend b").inner_text() == "0.5"
    row = page.locator("#events tr").first
    assert row.locator("td").nth(2).inner_text() == "something␛[31m <b>happened</b>"
    assert row.get_attribute("class") == "bad" and page.locator("#events .none").count() == 0
    with page.expect_navigation():
        registry.transition(run, ["running"], "stopped", "enough")
        page.clock.fast_forward(1100)
        page.clock.fast_forward(5100)
    assert page.locator(".badge").first.inner_text() == "stopped"
    assert page.get_by_text("enough").first.is_visible()
    assert page.get_by_role("button", name="Stop").count() == 0
    assert chart.is_visible(), "what was unfolded stays so"
