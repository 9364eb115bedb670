"""Every page in a real browser, over real runs of the three designs."""

import re
from pathlib import Path

import pytest
from browsing import draw_sections
from playwright.sync_api import expect

from rlx_registry import Registry, read_body

RLCR, KG, PROBE = "r-0001", "r-0003", "r-0004"
LAST = {RLCR: 6, KG: 3, PROBE: 2}


@pytest.fixture(scope="module")
def known(home):
    with Registry.open(f"sqlite:///{home}/registry.db", read_only=True) as registry:
        yield registry


def strongest(known, run, step):
    """The row whose advantage is largest."""
    return max(known.results.rollout_index(run, step), key=lambda row: abs(row.advantage))


def stored(known, run, step, row):
    """A row as it is in the file."""
    body = known.results.rollout_body(run, step)
    trees = read_body(Path(known.run(run).directory) / body.path, body.sha256).to_pylist()
    return next(r for tree in trees for r in tree["rows"] if r["row"] == row)


def test_three_links_from_the_first_page_to_why_a_sample_got_its_advantage(visit, real, known):
    step = LAST[RLCR]
    row = strongest(known, RLCR, step)
    page = visit(real)
    page.goto("/")
    page.get_by_role("button", name="2 runs").click()
    page.get_by_role("link", name=RLCR, exact=True).click()
    page.get_by_role("link", name=f"latest (step {step})").click()
    page.wait_for_url(f"**/rollouts/{step}*")  # until it has all of its rows
    while not page.locator(f"#row-{step}-{row.row}").count():
        with page.expect_navigation():
            page.locator("#older").click()
    page.locator(f"#row-{step}-{row.row} > .meta .why-link").click()
    page.locator("body[data-ready]").wait_for()
    assert page.url == f"{real}/runs/{RLCR}/rollouts/{step}/{row.row}"
    kept = stored(known, RLCR, step, row.row)
    learned = [a for a, m in zip(kept["advantages"], kept["mask"], strict=True) if m]
    mean = sum(learned) / len(learned)
    assert abs(mean) > 0.01
    strip = page.locator(".strip").inner_text()
    assert f"Advantage\n{mean:+.3g}" in strip
    assert f"Reward\n{row.reward:.4g}" in strip
    tokens = page.locator("#tokens .learns")
    assert tokens.count() == len(learned)
    tokens.first.hover()
    expect(page.locator("#readout")).to_contain_text("advantage ")
    told = page.locator("#readout").inner_text()
    assert float(re.search(r"advantage (\S+)", told)[1]) == pytest.approx(learned[0], rel=1e-3)
    assert "learns" in told


@pytest.mark.parametrize("run", LAST)
def test_every_section_of_a_run_has_its_charts(visit, real, known, run):
    page = visit(real)
    page.goto(f"/runs/{run}")
    draw_sections(page)
    drawn = 0
    for figure in page.locator("[data-section] figure.chart").all():
        assert figure.locator("canvas").count() == 1
        assert figure.locator(".legend .entry").count() >= 1
        drawn += figure.locator(".legend .entry").count()
    assert drawn == len(known.queries.metric_names(run))
    evaluations = known.results.evaluations(run, "held_out")
    measured = sum(e.metrics.get("brier") is not None for e in evaluations)
    assert page.locator(".reliability").count() == measured or run == KG
    assert page.get_by_text("rlx submit").count() >= 1


def test_rollouts_by_keyboard(visit, real):
    page = visit(real)
    page.goto(f"/runs/{RLCR}/rollouts/5")
    focused = "[...document.querySelectorAll('.tree')].indexOf(document.activeElement)"
    for key, at in (("j", 0), ("j", 1), ("j", 2), ("k", 1), ("k", 0), ("k", 0)):
        page.keyboard.press(key)
        assert page.evaluate(focused) == at, key
    for key, where in (
        ("n", "/5?.*page=2"), ("p", "/5?.*page=1"), ("]", r"/6\?"), ("[", r"/5\?"), ("[", r"/4\?")
    ):  # fmt: skip
        page.keyboard.press(key)
        page.wait_for_url(re.compile(f"/rollouts{where}"))
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("jjnp")
    assert page.locator("#search").input_value() == "jjnp", "typing is no command"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") != "search"
    page.locator("#slider").fill("2")
    page.wait_for_url("**/rollouts/2")


def shades(page):
    return page.eval_on_selector_all(
        "#tokens > *", "all => all.map((e) => [...e.classList].find((c) => /^[pn][1-8]$/.test(c)))"
    )


def test_tokens_by_another_channel(visit, real, known):
    step = LAST[RLCR]
    row = strongest(known, RLCR, step)
    page = visit(real)
    page.goto(f"/runs/{RLCR}/rollouts/{step}/{row.row}")
    page.locator("body[data-ready]").wait_for()
    first = shades(page)
    names = page.eval_on_selector_all("#channel option", "all => all.map((o) => o.value)")
    assert {"advantages", "behaviour", "old_logprobs", "drift"} <= set(names)
    page.get_by_label("colour").select_option("behaviour")
    second = shades(page)
    assert second != first
    assert {s[0] for s in second if s} == {"n"}, "a log-probability is below 0"
    page.get_by_label("colour").select_option("advantages")
    assert shades(page) == first, "the script paints as the server did"


def test_tokens_by_arrow_keys_and_in_a_table(visit, real, known):
    step = LAST[RLCR]
    page = visit(real)
    page.goto(f"/runs/{RLCR}/rollouts/{step}/0")
    page.locator("body[data-ready]").wait_for()
    told = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
        told.append(page.locator("#readout").inner_text().split()[0])
    assert told == ["#0", "#1", "#2", "#1"]
    assert page.locator(".chosen").count() == 1
    page.get_by_text("All values as a table").click()
    page.wait_for_function("document.querySelectorAll('#rows tr').length ==="
                           "document.querySelectorAll('#tokens > *').length")  # fmt: skip
    kept = stored(known, RLCR, step, 0)
    cells = page.locator("#rows tr").nth(kept["start"]).locator("td").all_inner_texts()
    assert float(cells[5]) == pytest.approx(kept["advantages"][0], rel=1e-3, abs=1e-9)
    page.keyboard.press("]")
    page.wait_for_url(f"**/rollouts/{step}/1")
