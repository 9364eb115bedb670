"""What a reader follows on the pages: a run that goes on, and a log that grows."""

import json
from pathlib import Path

import pytest
from browsing import served
from shown import submit


@pytest.fixture
def going(registry, tmp_path):
    """A run that goes on, and its folder."""
    folder = tmp_path / "runs" / "r-0001"
    folder.mkdir(parents=True)
    run = submit(registry, status="running")
    registry.update_run(run, directory=folder, step=1, steps_total=10, phase="one")
    return run, folder


def progress(folder, **fields):
    (folder / "progress.json").write_text(
        json.dumps({"stage": "warm start", "total": 400, "note": "", "doing": ""} | fields)
    )


def waited(page):
    """Lets the time pass after which a page asks again."""
    with page.expect_response("**/live.json*"):
        page.clock.fast_forward(5100)


def test_the_page_of_a_run_goes_on_with_it(visit, url, registry, going):
    run, folder = going
    progress(folder, done=1, note="loss 2.500")
    for step in (0, 1):
        registry.results.add_metrics(run, step, {"train/reward": step / 4, "perf/step_s": 1.0})
    with served(url) as address:
        page = visit(address)
        page.clock.install()
        page.goto(f"/runs/{run}")
        assert page.locator("[data-field=stage]").inner_text() == "warm start 1/400 loss 2.500"
        for part in page.locator("details.curves, #happened").all():
            part.locator("> summary").click()
        chart = page.locator("figure.chart", has_text="by turn")
        chart.locator("canvas").wait_for()
        assert chart.locator(".legend b").inner_text() == "0.25"
        registry.results.add_metrics(run, 2, {"train/reward": 0.5, "perf/step_s": 1.0})
        said = "something\x1b[31m <b>happened</b>"
        registry.results.add_event(run, "note", said, level="warning")
        registry.update_run(run, step=2, phase="two\u202e")
        progress(folder, done=300, note="\u202e<b>")
        waited(page)
        page.get_by_text("warm start 300/400 ⟨U+202E⟩<b>").wait_for()
        assert page.locator("progress.stage").evaluate("e => [e.value, e.max]") == [300, 400]
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


def test_a_reader_follows_a_log_and_downloads_it(visit, url, going):
    run, folder = going
    log = folder / "run.log"
    log.write_text("one\n")
    with served(url) as address:
        page = visit(address)
        page.clock.install()
        page.goto(f"/runs/{run}/log")
        assert page.locator("#lines").inner_text() == "one\n"
        log.write_text("one\ntwo \x1b[2J<script>\n")
        with page.expect_response("**/log.json*"):
            page.clock.fast_forward(5100)
        page.get_by_text("two ␛[2J<script>").wait_for()
        with page.expect_download() as download:
            page.get_by_role("link", name="download").click()
        assert Path(download.value.path()).read_text() == log.read_text()
        assert download.value.suggested_filename == "run.log"
